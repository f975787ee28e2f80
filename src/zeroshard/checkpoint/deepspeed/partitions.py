"""Parameters in the flat partitions of ZeRO stages 1 to 3.

Stages 1 and 2 put the parameters of a group one after another and cut the whole at multiples of the partition's
size; `param_shapes` has their order, round-robin included. Stage 3 cuts each parameter, and puts a rank's slices
one after another. Two ranks, parameters a (5 elements) and b (3 elements), `.` is padding:

    stages 1, 2    a a a a | a b b b        stage 3    a a a b b | a a . b .
                   rank 0    rank 1                    rank 0      rank 1

Padding at the end of a partition is cut off from the masters (not by BF16_Optimizer) but not from the other states.
With `parameter_alignment` there is padding between parameters too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zeroshard.checkpoint.deepspeed.files import CONVERT
from zeroshard.checkpoint.deepspeed.values import Value, from_parts, numel, scalars
from zeroshard.errors import CheckpointError

__all__ = ["Run", "frozen_of_stage_3", "partitioned", "runs_of_stage_3", "runs_of_stages_1_and_2"]

Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Of each group of parameters, which is one flat tensor on a rank: names and shapes in the order in it."""


@dataclass(frozen=True)
class Run:
    """Elements `[start, start + count)` of a parameter are at `begin` of the flat tensor of a rank and group."""

    start: int
    count: int
    rank: int
    group: int
    begin: int


Runs = dict[str, list[Run]]


def runs_of_stages_1_and_2(
    shapes: Shapes,
    sizes: Sequence[Sequence[int]],
    padding: Sequence[Sequence[int]] | None,
    paths: Sequence[Path],
) -> Runs:
    """Where the elements of each parameter are. `sizes`: elements of each group's partition, by rank."""
    runs: Runs = {}
    world = len(sizes)
    for group, members in enumerate(shapes):
        between = padding[group] if padding is not None else [0] * len(members)
        if len(between) != len(members):
            raise _leftover(f"group {group}", "parameters", len(members), len(between), paths)
        bounds = [0]
        for rank in range(world):
            bounds.append(bounds[-1] + sizes[rank][group])
        at = 0
        for (name, shape), space in zip(members.items(), between, strict=True):
            count = numel(shape)
            runs[name] = [
                Run(max(low, at) - at, min(high, at + count) - max(low, at), rank, group, max(low, at) - low)
                for rank, (low, high) in enumerate(itertools.pairwise(bounds))
                if max(low, at) < min(high, at + count)
            ]
            at += count + space
        # What is cut off at the end has changed over releases; it is less than this.
        align = 2 * world
        if bounds[-1] < at or math.ceil(at / align) != math.ceil(bounds[-1] / align):
            raise _leftover(f"group {group}", "elements", at, bounds[-1], paths)
    return runs


def runs_of_stage_3(shapes: Shapes, sizes: Sequence[Sequence[int]], paths: Sequence[Path]) -> Runs:
    """Where the elements of each parameter are. `sizes`: elements of each sub-group's partition, by rank."""
    runs: Runs = {}
    world = len(sizes)
    for group, members in enumerate(shapes):
        at = 0
        for name, shape in members.items():
            count = numel(shape)
            share = -(-count // world)
            runs[name] = [
                Run(rank * share, min(share, count - rank * share), rank, group, at)
                for rank in range(world)
                if rank * share < count
            ]
            at += share
        for rank in range(world):
            if sizes[rank][group] != at:
                raise _leftover(f"sub-group {group}", "elements", at, sizes[rank][group], [paths[rank]])
    return runs


def _leftover(group: str, unit: str, expected: int, found: int, paths: Sequence[Path]) -> CheckpointError:
    hint = ""
    if not found:
        hint = " (the states of an optimizer on NVMe are elsewhere: save with the optimizer on the CPU or device)"
    where = f"{paths[0]} and on" if len(paths) > 1 else str(paths[0])
    return CheckpointError(
        f"{group} of the optimizer has {found} {unit} in {where}, and the parameters that the model's "
        f"states name take {expected}{hint}. The files are of different runs: copy the checkpoint again. If "
        f"DeepSpeed lays them out in another way in the release that wrote them, {CONVERT}."
    )


def partitioned(
    shapes: Shapes,
    runs: Runs,
    masters: Sequence[Sequence[Tensor]],
    states: Sequence[Sequence[Mapping[str, Any]]],
) -> dict[str, Value]:
    """The model's trained parameters and the optimizer's state. `masters` and `states`: by rank, then by group."""
    values: dict[str, Value] = {}
    for group, members in enumerate(shapes):
        flat = {"model": [rank[group] for rank in masters]}
        for key in _flat_keys(states[0][group], masters[0][group]):
            flat[f"optimizer/{key}"] = [rank[group][key] for rank in states]
        single = {f"optimizer/{key}": value for key, value in scalars(states[0][group]).items()}
        for name, shape in members.items():
            for kind, by_rank in flat.items():
                values[f"{kind}/{name}"] = from_parts(shape, _slices(runs[name], by_rank))
            values.update({f"{kind}/{name}": value for kind, value in single.items()})
    return values


def _flat_keys(state: Mapping[str, Any], master: Tensor) -> list[str]:
    return [k for k, v in state.items() if isinstance(v, Tensor) and v.dim() and v.numel() >= master.numel()]


def _slices(runs: list[Run], by_rank: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Of the flat tensors of one group."""
    for run in runs:
        yield run.start, _cut(by_rank[run.rank], run.begin, run.count)


def _cut(tensor: Tensor, begin: int, count: int) -> Tensor:
    if tensor.numel() < begin + count:
        raise ValueError(f"a tensor of {tensor.numel()} elements where {begin + count} or more belong")
    return tensor.reshape(-1)[begin : begin + count]


def frozen_of_stage_3(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    """What is not trained, from the model's states of all ranks: a slice of each parameter, padded on the last."""
    found: dict[str, Value] = {}
    for name, shape in (ranks[0].get("frozen_param_shapes") or {}).items():
        share = -(-numel(shape) // len(ranks))
        slices = []
        for rank, states in enumerate(ranks):
            count = max(0, min(share, numel(shape) - rank * share))
            slices.append((rank * share, _cut(states["frozen_param_fragments"][name], 0, count)))
        found[f"model/{name}"] = from_parts(shape, slices)
    return found
