"""Checkpoints of stage 0: one file has the whole model and the whole optimizer.

The optimizer's state is in one of three forms: torch's own (fp32); fp32 copies of 16-bit parameters, one by one
(`fp32_groups`) or flat by group (`fp32_groups_flat`). None has names: see `order`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.deepspeed.order import Group, assign
from zeroshard.checkpoint.deepspeed.values import SAMPLE, Value, from_parts, numel, scalars, whole
from zeroshard.errors import CheckpointError

__all__ = ["Order", "module_values", "optimizer_values", "shared_names"]

Order = Sequence[Sequence[str]]
"""Names of the parameters of each group of the optimizer, in the order in which it was given them."""


def module_values(states: Mapping[str, Any], *, placeholders: bool = False) -> dict[str, Value]:
    """Parameters and buffers of the module's state dict. `placeholders`: empty ones stand for what is elsewhere."""
    buffers = set(states["buffer_names"])
    return {
        f"model/{name}": whole(tensor)
        for name, tensor in (states["module"] or {}).items()
        if isinstance(tensor, Tensor) and (tensor.numel() or name in buffers or not placeholders)
    }


def shared_names(states: Mapping[str, Any]) -> dict[str, str]:
    """{alias: first name} of tied parameters: what shares memory in the file, and what DeepSpeed noted."""
    module = states["module"] or {}
    first: dict[tuple[int, torch.Size], str] = {}
    aliases = {
        alias: stored
        for alias, stored in (states.get("shared_params") or {}).items()
        if alias not in module or stored not in module or module[alias].shape == module[stored].shape
    }
    for name, tensor in module.items():
        if isinstance(tensor, Tensor) and tensor.numel() and name not in states["buffer_names"]:
            stored = first.setdefault((tensor.data_ptr(), tensor.shape), name)
            if stored != name:
                aliases[name] = stored
    return aliases


def optimizer_values(
    states: Mapping[str, Any], order: Order | None, path: Path
) -> tuple[dict[str, Value], list[dict[str, Any]]]:
    """Masters and optimizer state by name, and the parameter groups with names.

    Raises CheckpointError when the names cannot be told and `order` was not given.
    """
    saved = states["optimizer"]
    inner = saved.get("optimizer_state_dict", saved)
    aliases = shared_names(states)
    weights = {
        name: tensor
        for name, tensor in states["module"].items()
        if isinstance(tensor, Tensor) and name not in states["buffer_names"] and name not in aliases
    }
    flat = saved.get("fp32_groups_flat")
    groups = inner["param_groups"]
    names = _names(order, weights, saved, inner, path)
    values: dict[str, Value] = {}
    for index, (group, members) in enumerate(zip(groups, names, strict=True)):
        if flat is not None:
            values.update(
                _from_flat(flat[index], inner["state"].get(group["params"][0], {}), members, weights)
            )
            continue
        for place, (position, name) in enumerate(zip(group["params"], members, strict=True)):
            if "fp32_groups" in saved:
                values[f"model/{name}"] = whole(saved["fp32_groups"][index][place])
            state = inner["state"].get(position, {})
            tensors = {
                key: whole(entry) for key, entry in state.items() if isinstance(entry, Tensor) and entry.dim()
            }
            for key, value in {**tensors, **scalars(state)}.items():
                values[f"optimizer/{key}/{name}"] = value
    named = [
        {**{key: option for key, option in group.items() if key != "param_names"}, "params": list(members)}
        for group, members in zip(groups, names, strict=True)
    ]
    return values, named


def _names(
    order: Order | None,
    weights: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    inner: Mapping[str, Any],
    path: Path,
) -> Order:
    """Of each group: as the caller or the optimizer says, else as they fit."""
    groups = inner["param_groups"]
    names = order or [group["param_names"] for group in groups if "param_names" in group]
    if not names:
        return _told_apart(weights, saved, inner, path)
    if strangers := {name for members in names for name in members} - set(weights):
        raise CheckpointError(
            f"the optimizer's order names {min(strangers)!r}, and {path} has no such parameter. Pass the names "
            f"that it has, such as {next(iter(weights))!r}; of a tied parameter the first."
        )
    sizes = [len(members) for members in names]
    places = [len(group["params"]) for group in groups]
    if len(sizes) != len(places) or ("fp32_groups_flat" not in saved and sizes != places):
        raise CheckpointError(
            f"the optimizer's order has groups of {sizes} names, and the optimizer in {path} has groups of "
            f"{places}. Pass the names in the groups in which that optimizer was given them."
        )
    return names


def _told_apart(
    weights: Mapping[str, Tensor], saved: Mapping[str, Any], inner: Mapping[str, Any], path: Path
) -> list[list[str]]:
    flat = saved.get("fp32_groups_flat")
    if flat is not None:
        places = [Group(master.numel(), _values_fit(master, weights)) for master in flat]
    elif "fp32_groups" in saved:
        places = [Group(len(masters), _value_fits(masters, weights)) for masters in saved["fp32_groups"]]
    else:
        places = [
            Group(len(group["params"]), _shape_fits(group["params"], inner["state"], weights))
            for group in inner["param_groups"]
        ]
    try:
        names = assign(list(weights), places, lambda name: weights[name].numel() if flat is not None else 1)
    except LookupError:
        problem = "none of the orders in which they are in the model fits its shapes and values"
    else:
        if names is not None:
            return names
        problem = "more than one order fits its shapes and values"
    raise CheckpointError(
        f"{path} has the optimizer's state of stage 0 without the names of its parameters, and {problem}. Pass "
        f"optimizer_order, the names of each parameter group's parameters as the optimizer was given them, or read "
        f"without the optimizer."
    )


def _values_fit(master: Tensor, weights: Mapping[str, Tensor]) -> Any:
    # A sample will do: where one order only passes a loose test it is the right one, since that passes any.
    def fits(at: int, name: str) -> bool:
        weight = weights[name].reshape(-1)[:SAMPLE]
        return torch.equal(master[at : at + weight.numel()].to(weight.dtype), weight)

    return fits


def _value_fits(masters: Sequence[Tensor], weights: Mapping[str, Tensor]) -> Any:
    def fits(at: int, name: str) -> bool:
        if masters[at].shape != weights[name].shape:
            return False
        weight = weights[name].reshape(-1)[:SAMPLE]
        return torch.equal(masters[at].reshape(-1)[:SAMPLE].to(weight.dtype), weight)

    return fits


def _shape_fits(positions: Sequence[int], state: Mapping[int, Any], weights: Mapping[str, Tensor]) -> Any:
    """By the shape of the state; a parameter that has none (it never had a gradient) may be any."""

    def fits(at: int, name: str) -> bool:
        entries = [e for e in state.get(positions[at], {}).values() if isinstance(e, Tensor) and e.dim()]
        return not entries or any(entry.shape == weights[name].shape for entry in entries)

    return fits


def _from_flat(
    master: Tensor, state: Mapping[str, Any], names: Sequence[str], weights: Mapping[str, Tensor]
) -> dict[str, Value]:
    values: dict[str, Value] = {}
    at = 0
    entries = {"": master, **{k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}}
    for name in names:
        shape = weights[name].shape
        part = slice(at, at + numel(shape))
        for key, tensor in entries.items():
            target = f"optimizer/{key}/{name}" if key else f"model/{name}"
            values[target] = from_parts(shape, [(0, tensor.reshape(-1)[part])])
        values.update({f"optimizer/{key}/{name}": value for key, value in scalars(state).items()})
        at += numel(shape)
    return values
