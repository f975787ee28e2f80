"""What a checkpoint holds of an engine, under names that know no rank, stage or bucket.

    model/<name>              a parameter or buffer: its whole shape; of a trained one the fp32 master
    optimizer/<key>/<name>    one entry of the optimizer's state for a parameter, such as `exp_avg`
    number/<key>/<name>       such an entry that is a Python number
    rng/<rank>, extras        blobs: see `session`

The same names are looked up on load, so any layout opens what any other wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from zeroshard.checkpoint.views import FlatPiece
from zeroshard.errors import CheckpointError
from zeroshard.gradients import ShardSlice
from zeroshard.guard import INTEGER_OF
from zeroshard.layout import Piece
from zeroshard.precision import dtype_name
from zeroshard.states import States

__all__ = [
    "Targets",
    "aliases_of",
    "collect",
    "digests_of_frozen",
    "group_options",
    "model_names",
    "persistent_buffers",
    "targets_of",
]


_MODULUS = 2**31 - 1


def collect(
    states: States, model: nn.Module, optimizer: Optimizer | None, *, frozen: bool
) -> dict[str, FlatPiece | Tensor]:
    """What this rank has to save; nothing is copied. `frozen`: also parameters that are not trained."""
    found: dict[str, FlatPiece | Tensor] = {}
    for bucket, index, piece in _pieces(states):
        buffer = states.buffers[bucket]
        if frozen or states.gradients[bucket] is not None:
            found[f"model/{piece.slot.name}"] = _part(piece, buffer.owned[piece.in_shard])
        if optimizer is not None and states.slices[bucket]:
            part = states.slices[bucket][index]
            found.update(_entries(optimizer.state.get(part, {}), part, piece))
    if states.rank == 0:
        found.update({f"model/{name}": buffer for name, buffer in persistent_buffers(model).items()})
    return found


def digests_of_frozen(states: States) -> dict[str, list[Any]]:
    """Of each parameter that is not trained: its dtype, and a number that another value of it would hardly have.

    The sum of its bits as integers: the same however it is sharded. A collective.
    """
    names, sums = [], []
    for bucket, _, piece in _pieces(states):
        if states.gradients[bucket] is None:
            part = states.buffers[bucket].owned[piece.in_shard]
            words = part.contiguous().view(INTEGER_OF[part.element_size()])
            names.append((piece.slot.name, dtype_name(part.dtype)))
            # Each rank's is small enough for their sum to be exact.
            sums.append(float(int(words.sum(dtype=torch.int64)) % _MODULUS))
    totals = states.sum(sums) if sums else []
    copies = states.groups.replicate.size
    return {
        name: [dtype, int(total // copies) % _MODULUS]
        for (name, dtype), total in zip(names, totals, strict=True)
    }


def _pieces(states: States) -> Iterator[tuple[int, int, Piece]]:
    """(bucket, slot, this rank's piece of it) for all parameters."""
    for buffer in states.buffers:
        for index, piece in enumerate(buffer.layout.pieces(buffer.group.rank)):
            yield buffer.layout.index, index, piece


def _part(piece: Piece, values: Tensor) -> FlatPiece | Tensor:
    if not piece.slot.numel:  # no box holds it, and it is to be there
        return values.detach().reshape(piece.slot.spec.shape)
    return FlatPiece(piece.slot.spec.shape, piece.start, values)


def _entries(
    state: Mapping[str, Any], part: ShardSlice, piece: Piece
) -> Iterator[tuple[str, FlatPiece | Tensor]]:
    for key, value in state.items():
        name = f"optimizer/{key}/{piece.slot.name}"
        if isinstance(value, Tensor) and value.dim() and value.shape == part.shape:
            yield name, _part(piece, value.detach().reshape(-1))
        elif isinstance(value, Tensor) and (piece.is_whole or not value.dim()):
            yield name, value.detach()
        elif isinstance(value, (bool, int, float)):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            yield f"number/{key}/{piece.slot.name}", torch.tensor(value, dtype=dtype)
        elif value is not None:
            raise CheckpointError(
                f"the optimizer's state {key!r} of {piece.slot.name!r} is {type(value).__name__}"
                f"{f' of shape {tuple(value.shape)}' if isinstance(value, Tensor) else ''}: neither a number nor a "
                f"tensor of the parameter's shape, so it cannot be put together on another number of ranks"
            )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong in a state dict, by their first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, buffer in _named_buffers(model):
        if id(buffer) not in seen:
            seen.add(id(buffer))
            found[name] = buffer
    return found


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those of a state dict, by each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def model_names(states: States, model: nn.Module) -> dict[str, tuple[int, ...]]:
    """All parameters and persistent buffers, and their shapes."""
    names = {slot.name: slot.spec.shape for buffer in states.buffers for slot in buffer.layout.slots}
    names.update({name: tuple(buffer.shape) for name, buffer in persistent_buffers(model).items()})
    return names


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters and shared buffers, and the name under which each is stored."""
    stored = [*model.named_parameters(), *persistent_buffers(model).items()]
    first = {id(value): name for name, value in stored}
    every = [*model.named_parameters(remove_duplicate=False), *_named_buffers(model)]
    return {name: first[id(value)] for name, value in every if first[id(value)] != name}


def group_options(states: States, optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """The optimizer's groups with names for parameters."""
    if optimizer is None:
        return []
    name_of = {
        id(part): slot.name
        for buffer, parts in zip(states.buffers, states.slices, strict=True)
        for slot, part in zip(buffer.layout.slots, parts, strict=False)
    }
    return [
        {**group, "params": [name_of[id(part)] for part in group["params"]]}
        for group in optimizer.param_groups
    ]


@dataclass
class Targets:
    """Where a load puts what, on this rank."""

    tensors: dict[str, Any] = field(default_factory=dict)
    """By name in the checkpoint: what DCP fills."""
    state: list[tuple[ShardSlice, str, Tensor, bool]] = field(default_factory=list)
    """The optimizer's new state: (parameter, key, value, is a Python number); the values are among `tensors`."""
    fresh: list[str] = field(default_factory=list)
    """Trained parameters for which the checkpoint has no optimizer state."""


def targets_of(
    states: States,
    model: nn.Module,
    optimizer: Optimizer | None,
    saved: Mapping[str, TensorStorageMetadata],
) -> Targets:
    """Weights go straight into this rank's part of what is trained; new tensors are made for optimizer state.

    `optimizer` is None where its state is not to be loaded.
    """
    targets = Targets()
    options = {id(part): g for g in (optimizer.param_groups if optimizer else ()) for part in g["params"]}
    entries: dict[str, list[tuple[str, str, TensorStorageMetadata]]] = {}
    for name, tensor in saved.items():
        kind, _, rest = name.partition("/")
        if kind in ("optimizer", "number"):
            key, _, parameter = rest.partition("/")
            entries.setdefault(parameter, []).append((name, key, tensor))
    for bucket, index, piece in _pieces(states):
        buffer, name = states.buffers[bucket], piece.slot.name
        if f"model/{name}" in saved:
            owned = buffer.owned[piece.in_shard]
            targets.tensors[f"model/{name}"] = _part(piece, owned)
        if optimizer is None or not states.slices[bucket] or states.gradients[bucket] is None:
            continue
        if name not in entries:
            # A parameter without elements never has state, nor has one that the optimizer was not given.
            trained = piece.slot.numel and id(states.slices[bucket][index]) in options
            targets.fresh += [name] if trained else []
        elif piece.numel:
            _add_state(targets, entries[name], states.slices[bucket][index], piece, options)
    for name, value in persistent_buffers(model).items():
        if f"model/{name}" in saved:
            targets.tensors[f"model/{name}"] = value
    if not entries:
        targets.fresh.clear()  # an optimizer without state, or saved before its first step: nothing is missing
    return targets


def _add_state(
    targets: Targets,
    entries: list[tuple[str, str, TensorStorageMetadata]],
    part: ShardSlice,
    piece: Piece,
    options: Mapping[int, Mapping[str, Any]],
) -> None:
    for name, key, saved in entries:
        shape = tuple(saved.size)
        single = not shape and piece.slot.spec.shape != ()
        group = options.get(id(part), {})
        # torch keeps `step` on the host, except for kernels that read it on the device.
        on_host = single and not (group.get("fused") or group.get("capturable"))
        device = torch.device("cpu") if on_host else part.device
        if shape != piece.slot.spec.shape and not single and not piece.is_whole:
            raise CheckpointError(
                f"{name!r} has shape {shape} in the checkpoint, not that of its parameter {piece.slot.spec.shape}, "
                f"and this optimizer cuts the parameter over ranks. Load with the optimizer that it was saved "
                f"with, or with load_optimizer_states=False."
            )
        is_part = shape == piece.slot.spec.shape
        value = torch.zeros(part.shape if is_part else shape, dtype=saved.properties.dtype, device=device)
        targets.tensors[name] = _part(piece, value.reshape(-1)) if is_part else value
        targets.state.append((part, key, value, name.startswith("number/")))
