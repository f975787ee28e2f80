"""Saving an engine, and loading one: what is in a checkpoint besides tensors, and how ranks stay together.

Both are collectives. An error on one rank is an error on all of them, and names the rank.
"""

from __future__ import annotations

import importlib.metadata
import io
import logging
import os
import platform
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from zeroshard.checkpoint.contents import (
    Targets,
    aliases_of,
    collect,
    group_options,
    model_names,
    targets_of,
)
from zeroshard.checkpoint.directory import Saves
from zeroshard.checkpoint.storage import EXTRAS, Reader, Writer
from zeroshard.checkpoint.views import PieceLoadPlanner, PieceSavePlanner
from zeroshard.config.nearest import closest
from zeroshard.errors import CheckpointError

if TYPE_CHECKING:
    from zeroshard.checkpoint.methods import Checkpoints

__all__ = ["load", "save"]

log = logging.getLogger("zeroshard")

T = TypeVar("T")


# ---- save -----------------------------------------------------------------------------------------------


def save(
    engine: Checkpoints,
    directory: str | os.PathLike[str],
    tag: str | None,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen: bool,
) -> str:
    """See `Engine.save_checkpoint`. Returns the tag."""
    states = engine._states
    tag = tag if tag is not None else f"global_step{engine._update.attempted}"
    saves = Saves(directory)
    began = time.monotonic()

    def prepare() -> dict[str, Any]:
        saves.check_tag(tag)
        contents: dict[str, Any] = dict(
            collect(states, engine.module, engine.optimizer, frozen=not exclude_frozen)
        )
        contents[f"rng/{states.rank}"] = _checked_blob(_random_state(engine), "the random state")
        if states.rank == 0:
            contents[EXTRAS] = _extras(engine, client_state, exclude_frozen)
        return contents

    contents = together(engine, "save_checkpoint", prepare)
    writer = Writer(saves, tag, _facts(engine), latest=save_latest)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(contents, storage_writer=writer, planner=PieceSavePlanner(), no_dist=states.world == 1)
    except CheckpointException as failures:
        if states.rank == 0:
            saves.abandon(tag)
        raise _told(failures, f"checkpoint {tag!r} could not be saved in {directory}") from failures
    if states.rank == 0:
        seconds = time.monotonic() - began
        log.info("saved %s in %.2f s", saves.directory / tag, seconds)
        for old in saves.prune(engine.config.checkpoint.keep_last, engine.config.checkpoint.keep_every):
            log.info("deleted checkpoint %s: keep_last is %d", old, engine.config.checkpoint.keep_last)
    return tag


def _facts(engine: Checkpoints) -> dict[str, Any]:
    """What a look at the index alone should tell."""
    return {
        "step": engine._update.attempted,
        "world_size": engine._states.world,
        "zero_stage": engine.policy.stage,
        "zeroshard": importlib.metadata.version("zeroshard"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _extras(engine: Checkpoints, client_state: Mapping[str, Any], exclude_frozen: bool) -> Any:
    scheduler, loader = engine.lr_scheduler, engine.training_dataloader
    _checked_blob(dict(client_state), "client_state")
    return _checked_blob(
        {
            **engine._update.counters(),
            "global_samples": engine.global_samples,
            "micro_steps": engine.micro_steps,
            "loss_scale": engine._update.loss_scale.state_dict(),
            "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
            "loader": loader.state_dict() if hasattr(loader, "state_dict") else None,
            "param_groups": group_options(engine._states, engine.optimizer),
            "client_state": dict(client_state),
            "aliases": aliases_of(engine.module),
            "frozen_excluded": exclude_frozen,
            "config": engine.config.model_dump_json(exclude_unset=True),
            **_facts(engine),
        },
        "the state of the learning-rate scheduler, the loader or an optimizer option",
    )


def _checked_blob(value: dict[str, Any], what: str) -> dict[str, Any]:
    """`value`, if torch reads it back without running code; CheckpointError naming the entry that it does not."""
    for key, entry in value.items():
        buffer = io.BytesIO()
        try:
            torch.save(entry, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:  # pickle raises anything
            named = re.search(r"Unsupported \w+: GLOBAL (\S+)", str(error))
            culprit = named[1] if named else type(error).__name__
            raise CheckpointError(
                f"entry {key!r} ({type(entry).__name__}) of {what} cannot be saved, because of {culprit}: a "
                f"checkpoint holds tensors, numbers, text, and lists, tuples and dicts of them, so that opening one "
                f"never runs code. Convert it first."
            ) from error
    return value


def _random_state(engine: Checkpoints) -> dict[str, Any]:
    """Of every generator that training draws from on this rank."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (str(name), torch.tensor(keys.astype("int64")), *(float(x) for x in rest))
    if engine.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(engine.device)
    return state


def _set_random_state(engine: Checkpoints, state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, position, has_gauss, cached = state["numpy"]
        generator = (name, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached)
        numpy.random.set_state(generator)
    if "cuda" in state and engine.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], engine.device)


# ---- load -----------------------------------------------------------------------------------------------


def load(
    engine: Checkpoints,
    directory: str | os.PathLike[str],
    tag: str | None,
    *,
    strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
    module_only: bool,
) -> tuple[str | None, dict[str, Any]]:
    """See `Engine.load_checkpoint`."""
    states = engine._states
    saves = Saves(directory)
    tag = tag if tag is not None else saves.latest()
    if together(engine, "load_checkpoint", lambda: tag is None):
        if states.rank == 0:
            there = ", ".join(saves.tags()) or "no checkpoint either"
            log.warning(
                "%s has no file `latest`, and no tag was given: nothing is loaded. It has %s",
                directory,
                there,
            )
        return None, {}
    assert tag is not None
    optimizer = engine.optimizer if optimizer_states and not module_only else None

    def open_it() -> tuple[Reader, dict[str, Any], Targets]:
        reader = Reader(saves.find(tag))
        extras = reader.extras()
        _check_names(engine, reader, extras, strict)
        return reader, extras, targets_of(states, engine.module, optimizer, reader.index.tensors)

    reader, extras, targets = together(engine, "load_checkpoint", open_it)
    engine._executor.end_step()
    engine._executor.reduces.clear()
    engine._update.drop_window()
    for buffer in states.buffers:
        buffer.check_refreshable()
        buffer.wait()
    together(engine, "load_checkpoint", lambda: _read(reader, targets))
    for buffer in states.buffers:
        buffer.refresh()
    if optimizer is not None:
        _set_optimizer(engine, targets, extras)
    if not module_only:
        together(engine, "load_checkpoint", lambda: _set_rest(engine, reader, extras, scheduler_states))
    if states.rank == 0:
        log.info(
            "loaded %s, written at step %s on %s ranks",
            reader.directory,
            extras["step"],
            extras["world_size"],
        )
        if targets.fresh and extras["param_groups"]:
            log.warning(
                "the checkpoint has no optimizer state for %d parameters (%s, ...): theirs starts anew",
                len(targets.fresh),
                targets.fresh[0],
            )
    return str(reader.directory), extras["client_state"]


def _check_names(engine: Checkpoints, reader: Reader, extras: Mapping[str, Any], strict: bool) -> None:
    """The checkpoint is of this model, or the differences are what the caller wants."""
    here = model_names(engine._states, engine.module)
    there = {
        name.removeprefix("model/"): tuple(tensor.size)
        for name, tensor in reader.index.tensors.items()
        if name.startswith("model/")
    }
    for name, shape in here.items():
        if name in there and there[name] != shape:
            raise CheckpointError(
                f"{reader.directory}: {name!r} has shape {there[name]} in the checkpoint and {shape} in the model. "
                f"Build the model that was saved."
            )
    frozen = {
        slot.name
        for buffer, gradient in zip(engine._states.buffers, engine._states.gradients, strict=True)
        if gradient is None
        for slot in buffer.layout.slots
    }
    missing = [name for name in here if name not in there]
    if extras.get("frozen_excluded"):
        missing = [name for name in missing if name not in frozen]
    unexpected = [name for name in there if name not in here]
    if (missing or unexpected) and strict:
        near = closest(missing[0], unexpected) if missing and unexpected else None
        raise CheckpointError(
            f"{reader.directory} is a checkpoint of another model. "
            + (f"It lacks {_listed(missing)} of this model. " if missing else "")
            + (f"It has {_listed(unexpected)}, which this model does not. " if unexpected else "")
            + (f"Was {near!r} renamed to {missing[0]!r}? " if near else "")
            + "Build the model that was saved; load_module_strict=False loads what both have."
        )
    if (missing or unexpected) and engine._states.rank == 0:
        log.warning(
            "%s: %d tensors of the model are not in the checkpoint and stay as they are (%s); %d of the checkpoint "
            "are not in the model (%s)",
            reader.directory,
            len(missing),
            _listed(missing),
            len(unexpected),
            _listed(unexpected),
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none"


def _read(reader: Reader, targets: Targets) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(targets.tensors, storage_reader=reader, planner=PieceLoadPlanner(), no_dist=True)


def _set_optimizer(engine: Checkpoints, targets: Targets, extras: Mapping[str, Any]) -> None:
    """State that was read, and each group's options from the saved group that holds its first parameter."""
    optimizer = engine.optimizer
    assert optimizer is not None
    optimizer.state.clear()
    for part, key, value, is_number in targets.state:
        optimizer.state.setdefault(part, {})[key] = value.item() if is_number else value
    saved_of = {name: group for group in extras["param_groups"] for name in group["params"]}
    for group, names in zip(optimizer.param_groups, group_options(engine._states, optimizer), strict=True):
        saved: dict[str, Any] = next((saved_of[name] for name in names["params"] if name in saved_of), {})
        group.update({key: value for key, value in saved.items() if key != "params"})


def _set_rest(engine: Checkpoints, reader: Reader, extras: Mapping[str, Any], scheduler_states: bool) -> None:
    engine._update.set_counters(extras)
    engine._update.loss_scale.load_state_dict(extras["loss_scale"])
    engine.global_samples, engine.micro_steps = extras["global_samples"], extras["micro_steps"]
    if scheduler_states and engine.lr_scheduler is not None and extras["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(extras["lr_scheduler"])
    loader = engine.training_dataloader
    if extras["loader"] is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(extras["loader"])
    blob = f"rng/{engine._states.rank}"
    if blob in reader.index.blobs:
        _set_random_state(engine, torch.load(io.BytesIO(reader.blob(blob)), weights_only=True))


# ---- together -------------------------------------------------------------------------------------------


def together(engine: Checkpoints, what: str, action: Callable[[], T]) -> T:
    """`action()`, which is no collective; when it raises on one rank, all ranks raise."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    states = engine._states
    if states.sum([float(problem is not None)])[0]:
        texts: list[Any] = [None] * states.world
        if states.world > 1:
            dist.all_gather_object(texts, None if problem is None else f"{problem}")
        if problem is not None:
            raise problem
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        raise CheckpointError(f"{what}: rank {rank} could not go on: {text}")
    return result  # type: ignore[return-value]


def _told(failures: CheckpointException, what: str) -> BaseException:
    """One error with every rank's reason."""
    reasons: dict[str, list[int]] = {}
    for rank, (error, _) in sorted(failures.failures.items()):
        if isinstance(error, KeyboardInterrupt):
            return error
        text = (
            f"{error.strerror}: {error.filename}"
            if isinstance(error, OSError) and error.strerror
            else str(error)
        )
        reasons.setdefault(text, []).append(rank)
    told = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in reasons.items())
    return CheckpointError(f"{what}. {told}. Nothing of it is left; what `latest` names is as before.")
