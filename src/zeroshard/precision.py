"""Dtypes by name, and the visible rule by which inputs are cast."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "cast_floating", "dtype_name", "dtype_of", "map_tensors", "squared_norm", "tensors_in"]

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By their names in configs and on command lines."""

MAX_DEPTH = 8
"""Containers within containers that are looked into; deeper ones are left alone, and so are circles."""


NORM_ROW = 4096


def dtype_of(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def squared_norm(tensor: Tensor) -> Tensor:
    """The sum of squares of a 1-D tensor, a float64 scalar on its device, exact to about 1e-7.

    Rows of a few thousand elements are summed in fp32 and the rows in float64: one pass, as fast as one fp32
    sum of all, which on the CPU is off by 1e-3 for tens of millions of elements.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    whole = tensor.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(tensor[:whole].view(-1, NORM_ROW), dim=1, dtype=wide)
    rest = torch.linalg.vector_norm(tensor[whole:], dtype=wide)
    total: Tensor = rows.double().square().sum() + rest.double().square()
    return total


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples, dicts, dataclasses and plain objects, in order of appearance."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _collect(value, found, depth=0)
    return found


def _collect(value: Any, found: list[Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    if depth == MAX_DEPTH or isinstance(value, (str, bytes, type, torch.nn.Module)):
        return
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    else:
        items = getattr(value, "__dict__", {}).values()
    for item in items:
        _collect(item, found, depth + 1)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to every tensor in lists, tuples, dicts and dataclasses.

    Containers in which nothing changed are returned as they are, the same object.
    """
    if isinstance(value, Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # Hugging Face's are dicts as well
        return _map_fields(function, value)
    if isinstance(value, dict):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        if all(mapped[key] is value[key] for key in value):
            return value
        if type(value) is dict:
            return mapped
        copied = value.copy()
        copied.update(mapped)
        return copied
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _map_fields(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Not `dataclasses.replace`, which calls the constructor: that wants InitVars, and leaves out what is set after
    it."""
    found = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    changes = {name: new for name, old in found.items() if (new := map_tensors(function, old)) is not old}
    if not changes:
        return value
    copied = copy.copy(value)
    assign = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for name, new in changes.items():
        assign(copied, name, new)
    return copied


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in `value` as `dtype`; integers, booleans and complex numbers untouched."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor

    return map_tensors(cast, value)
