"""What is in a DeepSpeed checkpoint: every tensor under its name, and the rest as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.deepspeed.files import CONVERT, Files, find, missing, need_ranks
from zeroshard.checkpoint.deepspeed.partitions import (
    frozen_of_stage_3,
    partitioned,
    runs_of_stage_3,
    runs_of_stages_1_and_2,
)
from zeroshard.checkpoint.deepspeed.pickles import open_states
from zeroshard.checkpoint.deepspeed.universal import check_order, missing_steps, universal_values
from zeroshard.checkpoint.deepspeed.values import Value, add_aliases, add_steps
from zeroshard.checkpoint.deepspeed.whole import Order, module_values, optimizer_values, shared_names
from zeroshard.errors import CheckpointError
from zeroshard.wording import in_one_line

__all__ = ["Contents", "read_contents"]

_CONSUMED = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
    ]
)
"""Keys of the model's states that are DeepSpeed's own; the others are the user's client_state."""


@dataclass
class Contents:
    values: dict[str, Value]
    extras: dict[str, Any]


def read_contents(directory: Path, *, with_optimizer: bool, order: Order | None) -> Contents:
    """Open the checkpoint in a tag's directory. Raises CheckpointError that names the file and the cure."""
    files = find(directory)
    try:
        if files.universal:
            return _universal(files, with_optimizer)
        if files.optimizer:
            return _partitions(files, with_optimizer)
        return _whole(files, with_optimizer, order)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory} is not laid out as DeepSpeed 0.7 to 0.19 does it ({in_one_line(error)}). If "
            f"another release wrote it, {CONVERT}, there."
        ) from error


def _partitions(files: Files, with_optimizer: bool) -> Contents:
    """Stages 1 to 3: the optimizer's files of all ranks hold the masters."""
    some = files.whole or files.shares[min(files.shares)]
    config = open_states(some).get("ds_config") or {}
    of_rank = files.optimizer_of(config)
    first = open_states(of_rank[min(of_rank)])["optimizer_state_dict"]
    counts = first["partition_count"]
    world = max(counts) if isinstance(counts, (list, tuple)) else counts
    if isinstance(counts, (list, tuple)) and min(counts) != world:
        raise CheckpointError(
            f"{of_rank[min(of_rank)]} has groups of parameters that are cut over {counts} ranks: it is of a run "
            f"with experts, which is not read. First {CONVERT}."
        )
    paths = need_ranks(of_rank, world)
    opened = [open_states(path)["optimizer_state_dict"] for path in paths]
    stage = int(first.get("zero_stage", (config.get("zero_optimization") or {}).get("stage", 1)))
    if stage == 3:
        models = [open_states(path) for path in _need_shares(files, world)]
        masters = [state["fp32_flat_groups"] for state in opened]
        inner = [state["optimizer_state_dict"] for state in opened]
    else:
        models = [open_states(_need_whole(files))]
        masters = [state["single_partition_of_fp32_groups"] for state in opened]
        inner = [state["base_optimizer_state"] for state in opened]
    shapes = models[0]["param_shapes"]
    sizes = [[flat.numel() for flat in rank] for rank in masters]
    if stage == 3:
        runs = runs_of_stage_3(shapes, sizes, paths)
    else:
        runs = runs_of_stages_1_and_2(shapes, sizes, first.get("param_alignment_paddings"), paths)
    states = [_by_group(state, len(shapes)) for state in inner]
    values = _untrained(models, stage) | partitioned(shapes, runs, masters, states)
    groups = _named_groups(inner[0], first, shapes)
    scaler = vars(first["loss_scaler"]) if "loss_scaler" in first else {}
    return _finish(values, models[0], groups, scaler, stage, world, with_optimizer)


def _by_group(inner: Any, groups: int) -> list[Mapping[str, Any]]:
    """The state of each group's flat tensor: torch's dict, or the list of `elastic_checkpoint`."""
    return list(inner) if isinstance(inner, list) else [inner["state"].get(i, {}) for i in range(groups)]


def _named_groups(
    inner: Any, first: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The options of the optimizer's groups. Each has one flat tensor, or a few: sub-groups of stage 3."""
    if isinstance(inner, list):
        step = first.get("base_optimizer_state_step")
        return [{"step": step, "params": list(members)} for members in shapes]
    return [
        {**group, "params": [name for index in group["params"] for name in shapes[index]]}
        for group in inner["param_groups"]
    ]


def _need_whole(files: Files) -> Path:
    if files.whole is None:
        raise missing(files.directory / "mp_rank_00_model_states.pt", "it has the names of the parameters")
    return files.whole


def _need_shares(files: Files, world: int) -> list[Path]:
    if not files.shares:
        first = files.directory / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        raise missing(first, "it has the names of the parameters")
    return need_ranks(files.shares, world)


def _untrained(models: Sequence[Mapping[str, Any]], stage: int) -> dict[str, Value]:
    """Buffers and frozen parameters, and the 16-bit values of trained ones where they are whole."""
    if stage == 3:
        return module_values(models[0], placeholders=True) | frozen_of_stage_3(models)
    return module_values(models[0])


def _whole(files: Files, with_optimizer: bool, order: Order | None) -> Contents:
    """Stage 0, or a checkpoint whose optimizer's files were left out."""
    if files.whole is None:
        path = files.shares[min(files.shares)]
        optimizer = path.with_name(path.name.replace("model", "optim"))
        raise missing(optimizer, "stage 3 has the weights in the optimizer's files (perhaps bf16_*)")
    states = open_states(files.whole)
    values = module_values(states)
    groups: list[dict[str, Any]] = []
    scaler: Mapping[str, Any] = {}
    stage = int(((states.get("ds_config") or {}).get("zero_optimization") or {}).get("stage", 0))
    if states.get("optimizer"):
        scaler = states["optimizer"]
        try:
            found, groups = optimizer_values(states, order, files.whole)
            values |= found
        except CheckpointError:  # who wants the model has it, if not as masters
            if with_optimizer:
                raise
    return _finish(values, states, groups, scaler, stage, states["dp_world_size"], with_optimizer)


def _universal(files: Files, with_optimizer: bool) -> Contents:
    zero = files.directory / "zero"
    state = open_states(zero / "optimizer_state.pt")
    stage = int(state.get("zero_stage", 1))  # BF16_Optimizer, which does not say, is stage 1
    if stage == 3:
        models = [open_states(path) for path in _need_shares(files, state["partition_count"])]
    else:
        models = [open_states(_need_whole(files))]
    world = models[0]["dp_world_size"]
    groups = models[0]["param_shapes"] or []
    shapes = {name: tuple(shape) for members in groups for name, shape in members.items()}
    values = _untrained(models, stage)
    # Everything else in the module is there as well, but as fp32: also integer buffers.
    known = {key.removeprefix("model/") for key in values if models[0]["mp_world_size"] == 1} - set(shapes)
    found = universal_values(zero, shapes, skip=known, with_optimizer=with_optimizer)
    if ((models[0].get("ds_config") or {}).get("zero_optimization") or {}).get("round_robin_gradients"):
        check_order(zero, found, values)
    values |= found
    values |= missing_steps(values, state, groups)
    named = _named_groups({"param_groups": state["param_groups"]}, state, groups)
    scaler = vars(state["loss_scaler"]) if "loss_scaler" in state else {}
    return _finish(values, models[0], named, scaler, stage, world, with_optimizer)


def _finish(
    values: dict[str, Value],
    model: Mapping[str, Any],
    groups: list[dict[str, Any]],
    scaler: Mapping[str, Any],
    stage: int,
    world: int,
    with_optimizer: bool,
) -> Contents:
    add_steps(values, groups)
    add_aliases(values, shared_names(model))
    if not with_optimizer:
        values = {key: value for key, value in values.items() if key.startswith("model/")}
        groups = []
    config = model.get("ds_config") or {}
    extras = {
        "global_steps": model["global_steps"],
        "skipped_steps": model["skipped_steps"],
        "global_samples": model.get(
            "global_samples", model["global_steps"] * config.get("train_batch_size", 0)
        ),
        "loss_scale": _loss_scale(scaler, config),
        "lr_scheduler": model.get("lr_scheduler"),
        "client_state": {key: value for key, value in model.items() if key not in _CONSUMED},
        "param_groups": groups,
        "world_size": world,
        "zero_stage": stage,
        "config": config,
        "version": model.get("ds_version"),
        "aliases": shared_names(model),
        "buffers": list(model.get("buffer_names") or ()),
    }
    return Contents(values, extras)


def _loss_scale(scaler: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """As `LossScale.state_dict`. Stage 0 keeps no hysteresis: all of it is left."""
    fp16 = config.get("fp16") or {}
    if not fp16.get("enabled") or "cur_scale" not in scaler:
        return {}
    return {
        "scale": float(scaler["cur_scale"]),
        "hysteresis": int(scaler.get("cur_hysteresis", fp16.get("hysteresis", 2))),
        "step": int(scaler.get("cur_iter", 0)),
        "last_overflow": int(scaler.get("last_overflow_iter", -1)),
    }
