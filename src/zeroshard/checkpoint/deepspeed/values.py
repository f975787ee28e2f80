"""A tensor of a checkpoint as the parts of it that lie in files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "SAMPLE",
    "Part",
    "Value",
    "add_aliases",
    "add_steps",
    "from_parts",
    "numel",
    "scalar",
    "scalars",
    "whole",
]

SAMPLE = 1024
"""Elements of a tensor that are compared where two should be the same, so that large ones are not read twice."""


@dataclass(frozen=True)
class Part:
    """Elements `[start, start + count)` of a flattened tensor; `read` gives them, 1-D and mapped from the file."""

    start: int
    count: int
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Value:
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    """In order; they have each element once."""


def whole(tensor: Tensor) -> Value:
    """A tensor that is in one file as it is."""
    flat = partial(tensor.detach().reshape, -1)
    return Value(tuple(tensor.shape), tensor.dtype, (Part(0, tensor.numel(), flat),))


def from_parts(shape: Sequence[int], slices: Iterable[tuple[int, Tensor]]) -> Value:
    """A tensor of which every slice is a (first element, 1-D tensor)."""
    parts, dtype = [], torch.float32
    for start, tensor in slices:
        parts.append(Part(start, tensor.numel(), partial(tensor.detach().reshape, -1)))
        dtype = tensor.dtype
    return Value(tuple(shape), dtype, tuple(parts))


def scalar(value: Any) -> Value:
    """A number that belongs to a whole parameter, such as `step`: 0-d, and fp32 like torch's steps."""
    return whole(value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float32))


def scalars(state: Mapping[str, Any]) -> dict[str, Value]:
    """The entries of one optimizer state that are numbers or 0-d tensors."""
    return {
        key: scalar(entry)
        for key, entry in state.items()
        if isinstance(entry, (int, float)) or (isinstance(entry, Tensor) and entry.dim() == 0)
    }


def numel(shape: Sequence[int]) -> int:
    return math.prod(shape)


def add_steps(values: dict[str, Value], groups: Iterable[dict[str, Any]]) -> None:
    """Of optimizers that count their steps in the parameter group: a state of each parameter, here.

    FusedAdam has a `step` in both, and moves that of the state only.
    """
    for group in groups:
        step = group.pop("step", None)
        for name in group["params"] if step is not None else ():
            values.setdefault(f"optimizer/step/{name}", scalar(step))


def add_aliases(values: dict[str, Value], aliases: Mapping[str, str]) -> None:
    """The other names of tied parameters: {alias: the name under which it is stored}."""
    others: dict[str, list[str]] = {}
    for alias, stored in aliases.items():
        others.setdefault(stored, []).append(alias)
    for key, value in list(values.items()):
        depth = 1 if key.startswith("model/") else 2
        *prefix, name = key.split("/", depth)
        for alias in others.get(name, ()):
            values["/".join([*prefix, alias])] = value
