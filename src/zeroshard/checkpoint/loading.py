"""Loading an engine from a checkpoint, whoever wrote it on however many ranks."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from zeroshard.checkpoint.contents import (
    Targets,
    digests_of_frozen,
    group_options,
    model_names,
    targets_of,
)
from zeroshard.checkpoint.deepspeed import is_deepspeed
from zeroshard.checkpoint.directory import Saves
from zeroshard.checkpoint.extras import restore_extras, set_random_state
from zeroshard.checkpoint.opening import open_checkpoint
from zeroshard.checkpoint.plain import check_known
from zeroshard.checkpoint.reading import CheckpointReader
from zeroshard.checkpoint.storage import INDEX
from zeroshard.checkpoint.together import together
from zeroshard.checkpoint.views import PieceLoadPlanner
from zeroshard.config.nearest import closest
from zeroshard.errors import CheckpointError
from zeroshard.states import States
from zeroshard.wording import first_few

if TYPE_CHECKING:
    from zeroshard.checkpoint.methods import Checkpoints

__all__ = ["load"]

CustomLoad = Callable[[Mapping[str, torch.Tensor], nn.Module], None]

log = logging.getLogger("zeroshard")

_KERNELS = ("fused", "foreach", "capturable")
"""Options of a group that say how, not what: those of this run stay."""


def load(
    engine: Checkpoints,
    directory: str | os.PathLike[str],
    tag: str | None,
    *,
    strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
    module_only: bool,
    custom: CustomLoad | None,
) -> tuple[str | None, dict[str, Any]]:
    """See `Engine.load_checkpoint`."""
    states = engine._states
    engine._saver.wait()  # or what is written now would be the latest for some ranks only
    saves = Saves(directory)
    if not _is_there(states, saves, tag):
        return None, {}
    optimizer = engine.optimizer if optimizer_states and not module_only else None

    def open_it() -> tuple[CheckpointReader, dict[str, Any], Targets]:
        reader = open_checkpoint(directory, tag)
        saved, extras = reader.tensors(), reader.extras()
        check_known(extras["client_state"], str(reader.directory))
        if custom is None:
            _check_names(engine, str(reader.directory), saved, extras, strict)
        else:
            saved = {name: tensor for name, tensor in saved.items() if not name.startswith("model/")}
        return reader, extras, targets_of(states, engine.module, optimizer, saved)

    reader, extras, targets = together(states, "load_checkpoint", open_it)
    if custom is None and extras.get("base") is not None:
        _check_base(engine, str(reader.directory), extras["base"])
    engine._states.passes.end_step()
    engine._executor.reduces.clear()
    engine._window = 0
    for buffer in states.buffers:
        buffer.check_refreshable()
        buffer.wait()
    together(states, "load_checkpoint", lambda: _read(reader, targets.tensors))
    for buffer in states.buffers:
        buffer.refresh()
    if custom is not None:
        _load_by(custom, engine, reader, extras)
    if optimizer is not None:
        _set_optimizer(engine, targets, extras)
    if not module_only:
        together(states, "load_checkpoint", lambda: restore_extras(engine, extras, scheduler_states))
        state = reader.random_state(states.rank)
        if state is not None:
            set_random_state(engine, state)
    engine._update.open_window()  # with the loss scale that was loaded
    if states.rank == 0:
        log.info(
            "loaded %s, written at step %s on %s ranks",
            reader.directory,
            extras["global_steps"],
            extras["world_size"],
        )
        if optimizer is not None:
            _tell_of_state(optimizer, targets, extras)
    return str(reader.directory), extras["client_state"]


def _tell_of_state(optimizer: Optimizer, targets: Targets, extras: Mapping[str, Any]) -> None:
    """What of the optimizer's state may not be what the caller expects."""
    wrote, here = extras.get("optimizer"), type(optimizer).__name__
    if wrote not in (None, here):
        log.warning(
            "the checkpoint has the state of %s, and the optimizer is %s: if that needs other entries, its step "
            "will fail; load_optimizer_states=False starts it anew",
            wrote,
            here,
        )
    if targets.fresh and extras["param_groups"]:
        log.warning(
            "the checkpoint has no optimizer state for %d parameters (%s, ...): theirs starts anew",
            len(targets.fresh),
            targets.fresh[0],
        )


def _is_there(states: States, saves: Saves, tag: str | None) -> bool:
    """There is something to load, for all ranks; where there is nothing, for none, that is told. A collective."""

    def nothing() -> bool:
        place = saves.directory
        return (
            tag is None
            and saves.latest() is None
            and not (place / INDEX).is_file()
            and not is_deepspeed(place)
        )

    missing = together(states, "load_checkpoint", nothing)
    without = states.ask([float(missing)])[0]
    if 0 < without < states.world:
        raise CheckpointError(
            f"{saves.directory}/latest is there for {states.world - without:g} of {states.world} ranks "
            f"({'not ' if missing else ''}for rank {states.rank}): all ranks must see one directory"
        )
    if without and states.rank == 0:
        there = ", ".join(saves.tags()) or "no checkpoint either"
        log.warning(
            "%s has no file `latest`, and no tag was given: nothing is loaded. It has %s",
            saves.directory,
            there,
        )
    return not without


def _load_by(
    custom: CustomLoad, engine: Checkpoints, reader: CheckpointReader, extras: Mapping[str, Any]
) -> None:
    """Let the user's function put the weights into the module: both are whole meanwhile, on every rank."""

    def read() -> dict[str, torch.Tensor]:
        whole = {
            name.removeprefix("model/"): torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in reader.tensors().items()
            if name.startswith("model/")
        }
        _read(reader, {f"model/{name}": tensor for name, tensor in whole.items()})
        return {**whole, **{alias: whole[name] for alias, name in extras["aliases"].items()}}

    whole = together(engine._states, "load_checkpoint", read)
    with engine.gathered(modifier_rank=0), torch.no_grad():
        custom(whole, engine.module)


def _check_names(
    engine: Checkpoints,
    where: str,
    saved: Mapping[str, TensorStorageMetadata],
    extras: Mapping[str, Any],
    strict: bool,
) -> None:
    """The checkpoint is of this model, or the differences are what the caller wants."""
    here = model_names(engine._states, engine.module)
    there = {
        name.removeprefix("model/"): tuple(tensor.size)
        for name, tensor in saved.items()
        if name.startswith("model/") and name.removeprefix("model/") not in extras["aliases"]
    }
    for name, shape in here.items():
        if name in there and there[name] != shape:
            raise CheckpointError(
                f"{where}: {name!r} has shape {there[name]} in the checkpoint and {shape} in the model. "
                f"Build the model that was saved."
            )
    frozen = {
        slot.name
        for buffer, gradient in zip(engine._states.buffers, engine._states.gradients, strict=True)
        if gradient is None
        for slot in buffer.layout.slots
    }
    missing = [name for name in here if name not in there]
    if extras.get("base") is not None:
        missing = [name for name in missing if name not in frozen]
    unexpected = [name for name in there if name not in here]
    if (missing or unexpected) and strict:
        near = closest(missing[0], unexpected) if missing and unexpected else None
        raise CheckpointError(
            f"{where} is a checkpoint of another model. "
            + (f"It lacks {_listed(missing)} of this model. " if missing else "")
            + (f"It has {_listed(unexpected)}, which this model does not. " if unexpected else "")
            + (f"Was {near!r} renamed to {missing[0]!r}? " if near else "")
            + "Build the model that was saved; load_module_strict=False loads what both have."
        )
    if (missing or unexpected) and engine._states.rank == 0:
        log.warning(
            "%s: %d tensors of the model are not in the checkpoint and stay as they are (%s); %d of the checkpoint "
            "are not in the model (%s)",
            where,
            len(missing),
            _listed(missing),
            len(unexpected),
            _listed(unexpected),
        )


def _check_base(engine: Checkpoints, where: str, saved: Mapping[str, list[Any]]) -> None:
    """What was left out of the checkpoint is here, and is what it was trained with."""
    here = digests_of_frozen(engine._states)
    missing = [name for name in saved if name not in here]
    other = [name for name, digest in here.items() if name in saved and saved[name] != digest]
    other = [name for name in other if saved[name][0] == here[name][0]]  # in another dtype nobody can tell
    if missing or other:
        raise CheckpointError(
            f"{where} was saved without frozen parameters, and the model does not have those it was trained with: "
            + (f"{_listed(missing)} are not frozen here, or not there. " if missing else "")
            + (f"{_listed(other)} have other values. " if other else "")
            + "Load the base model first, frozen as it was; load_module_strict=False has no part in this."
        )


def _listed(names: list[str]) -> str:
    return first_few([repr(name) for name in names], 3) or "none"


def _read(reader: CheckpointReader, targets: dict[str, Any]) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp_load(targets, storage_reader=reader, planner=PieceLoadPlanner(), no_dist=True)
        except CheckpointException as failures:
            # This rank's own: `together` tells the others.
            raise next(iter(failures.failures.values()))[0] from None


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
        known = {*group, "initial_lr"} - {"params", *_KERNELS}
        group.update({key: _like(value, group.get(key)) for key, value in saved.items() if key in known})


def _like(saved: Any, here: Any) -> Any:
    """A number or a tensor of one (a learning rate may be either), as it is in this run, and where."""
    if isinstance(here, torch.Tensor) and isinstance(saved, (float, int, torch.Tensor)):
        return torch.as_tensor(saved).to(here)
    if isinstance(here, (float, int)) and isinstance(saved, torch.Tensor):
        return saved.item()
    return saved
