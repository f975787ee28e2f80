"""Weights from safetensors files, each rank reading the elements that it keeps and no others.

The memory that this takes is the rank's part of the weights, which it has anyway: the files are mapped, and read
straight into the shards (and fp32 masters) of an engine, the pieces of cut parameters, or plain tensors.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.buffers import FlatBuffer
from zeroshard.comm import ballot, unanimous
from zeroshard.cut import Cuts
from zeroshard.engine import Engine
from zeroshard.errors import CheckpointError, StateError
from zeroshard.guard import home_of
from zeroshard.weights import Weights, match_names
from zeroshard.wording import first_few
from zeroshard.world import World, join

__all__ = ["Loaded", "load_pretrained"]

log = logging.getLogger("zeroshard")
_LOG_EVERY = 10.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What did not fit; both are empty when `strict`."""

    missing_keys: tuple[str, ...]
    """Parameters and persistent buffers that the files do not have; they were left as they were."""
    unexpected_keys: tuple[str, ...]
    """Tensors of the files that the model does not have."""


@dataclass(kw_only=True)
class _Target:
    """A parameter or buffer, and where its values come from."""

    names: list[str]
    """More than one when it is tied."""
    tensor: Tensor
    holders: list[tuple[dict[str, Any], str]]
    is_parameter: bool
    is_saved: bool = True
    sources: list[str] = field(default_factory=list)
    """Its names in the files."""


def load_pretrained(
    engine_or_model: Engine | nn.Module, directory_or_file: str | os.PathLike[str], strict: bool = True
) -> Loaded:
    """Load safetensors: a file, or a directory with `model.safetensors` or `model.safetensors.index.json`.

    Works before `initialize`, on a model that is cut (`zeroshard.Init`), on `meta` (which is cut by this, where
    there are several ranks) or plain, and after it, at every stage: fp32 masters get the values of the files, the
    model's copies follow. Optimizer state stays. Values are cast between floating-point dtypes. Names may have the
    model's `base_model_prefix` in front, or lack it. Of tied parameters one name is enough.

    Every rank calls it, with the same files. Raises CheckpointError on all ranks, before anything is written, for
    files that are missing or damaged and for names and shapes that do not fit; names only when `strict`.
    """
    model = engine_or_model.module if isinstance(engine_or_model, Engine) else engine_or_model
    world = join()
    targets = _targets_of(model)
    loaded: Loaded | None = None
    problem: Exception | None = None
    try:
        weights = Weights(directory_or_file)
        loaded = _match(weights, targets, getattr(model, "base_model_prefix", ""), strict)
        _check(weights, targets)
        buffers = _engine_buffers(targets)
    except (CheckpointError, StateError) as error:
        problem = error
    _agree(problem, world, [] if loaded is None else [_plan(weights, targets)], "and nothing was written")
    assert loaded is not None
    _give_places(targets, world)
    try:
        _read(weights, [target for target in targets if target.sources], world)
    except Exception as error:  # a disk that fails; the other ranks wait for the answer
        problem = error
    _agree(problem, world, [], "and weights are written in part: load again, or build the model anew")
    for buffer in buffers:
        buffer.refresh()
    return loaded


def _targets_of(model: nn.Module) -> list[_Target]:
    """In order of definition, tied ones once."""
    found: dict[int, _Target] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                is_parameter = held is module._parameters
                target = found.setdefault(
                    id(tensor),
                    _Target(names=[], tensor=tensor, holders=[], is_parameter=is_parameter),
                )
                target.names.append(f"{path}.{name}" if path else name)
                target.holders.append((held, name))
                target.is_saved &= is_parameter or name not in module._non_persistent_buffers_set
    return list(found.values())


def _match(weights: Weights, targets: Sequence[_Target], prefix: str, strict: bool) -> Loaded:
    wanted = [name for target in targets if target.is_saved for name in target.names]
    source_of, unexpected = match_names(weights.names, wanted, prefix)
    for target in targets:
        target.sources = [source_of[name] for name in target.names if name in source_of]
    missing = [target.names[0] for target in targets if target.is_saved and not target.sources]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{weights.path} does not fit the model: missing {_some(missing)}; unexpected {_some(unexpected)}. "
            f"Pass strict=False to load what fits. A model that stores its weights in another form than its files "
            f"is loaded by its own `from_pretrained`, under zeroshard.Init"
        )
    return Loaded(missing_keys=tuple(missing), unexpected_keys=tuple(unexpected))


def _some(names: Sequence[str]) -> str:
    return first_few([repr(name) for name in names], 5) or "nothing"


def _check(weights: Weights, targets: Sequence[_Target]) -> None:
    for target in targets:
        name, tensor = target.names[0], target.tensor
        if tensor.is_meta and not target.sources:
            raise CheckpointError(
                f"{name!r} is on the meta device and the files have no values for it"
                + ("" if target.is_saved else " (it is a buffer that is not saved)")
                + ". Build the model under zeroshard.Init, on a real device"
            )
        for source in target.sources:
            shape, dtype = weights.shape(source), weights.dtype(source)
            where = f"{weights.file_of(source)}: {source!r}"
            if shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{where} has shape {shape}; {name!r} of the model has {tuple(tensor.shape)}"
                )
            if dtype is not tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
                raise CheckpointError(f"{where} has dtype {dtype}; {name!r} of the model has {tensor.dtype}")
        _check_tied(weights, target)
        home = home_of(tensor)
        if home is not None and home.buffer is None and home.claims:
            raise StateError(f"load_pretrained inside GatheredParameters of {name!r}; leave the block first")


def _check_tied(weights: Weights, target: _Target) -> None:
    numel = target.tensor.numel()
    for other in target.sources[1:]:
        first = target.sources[0]
        for start in range(0, numel, _COMPARED):
            stop = min(start + _COMPARED, numel)
            if not torch.equal(weights.read(first, start, stop), weights.read(other, start, stop)):
                raise CheckpointError(
                    f"{weights.path}: {first!r} and {other!r} differ, and are one tensor in the model "
                    f"({', '.join(target.names)}). Untie them in the model, or remove one from the files"
                )


_COMPARED = 1 << 20


def _engine_buffers(targets: Sequence[_Target]) -> list[FlatBuffer]:
    """The buffers that get new values, ready for them."""
    found: dict[int, FlatBuffer] = {}
    for target in targets:
        home = home_of(target.tensor)
        if home is not None and home.buffer is not None and target.sources:
            found[home.buffer.layout.index] = home.buffer
    ordered = [found[index] for index in sorted(found)]
    for buffer in ordered:
        buffer.check_refreshable()
        buffer.wait()
    return ordered


def _plan(weights: Weights, targets: Sequence[_Target]) -> int:
    facts = [(target.names, target.sources, [weights.dtype(s) for s in target.sources]) for target in targets]
    return zlib.crc32(repr(facts).encode())


def _agree(problem: Exception | None, world: World, checksums: Sequence[int], so: str) -> None:
    """A problem of one rank is an error on all. Nobody reads this rank's shards any more, once it returns."""
    if world.size > 1:
        mine = [float(problem is not None), *ballot(checksums or [0])]
        sums = torch.tensor(mine, dtype=torch.float64, device=world.device)
        dist.all_reduce(sums, group=world.group)
        failures, *votes = sums.tolist()
        if problem is None and failures:
            raise CheckpointError(f"another rank could not load, {so}; its message says why")
        if problem is None and not all(unanimous(votes, world.size)):
            raise CheckpointError(f"ranks load different files or models, {so} (this is rank {world.rank})")
    if problem is not None:
        raise problem


def _give_places(targets: Sequence[_Target], world: World) -> None:
    """Put what lies open under `zeroshard.Init` away, and real tensors in the place of those on meta."""
    cut = [home for target in targets if (home := home_of(target.tensor)) and home.buffer is None]
    for cuts in dict.fromkeys(home.access for home in cut):  # in an order that all ranks share
        cuts.put_all_away()
    for target in targets:
        if not target.tensor.is_meta:
            continue
        if not target.is_parameter:
            fresh: Tensor = torch.empty_like(target.tensor, device=world.device)
        elif world.size > 1 and world.group is not None:
            assert isinstance(target.tensor, nn.Parameter)
            fresh = Cuts.of(world.group, world.device).add_empty(target.tensor, target.names[0])
        else:
            fresh = nn.Parameter(
                torch.empty_like(target.tensor, device=world.device), target.tensor.requires_grad
            )
        for held, name in target.holders:
            held[name] = fresh
        target.tensor = fresh


def _read(weights: Weights, targets: Sequence[_Target], world: World) -> None:
    total = sum(_own(target.tensor)[1].nbytes for target in targets)
    done, told = 0, time.monotonic()
    for target in targets:
        start, own = _own(target.tensor)
        values = weights.read(target.sources[0], start, start + own.numel())
        with torch.no_grad():
            own.copy_(values.view(own.shape))
        done += own.nbytes
        if world.rank == 0 and time.monotonic() - told > _LOG_EVERY:
            told = time.monotonic()
            log.info("loading %s: %.1f of %.1f GB of this rank", weights.path, done / 1e9, total / 1e9)


def _own(tensor: Tensor) -> tuple[int, Tensor]:
    """The memory on this rank that holds values of `tensor`, and the number of its first element."""
    home = home_of(tensor)
    if home is None:
        return 0, tensor.data
    if home.buffer is None:
        return home.range_of(home.access.rank)[0], home.piece
    piece = home.buffer.layout.pieces(home.buffer.group.rank)[home.index]
    return piece.start, home.buffer.owned.detach()[piece.in_shard]
