from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from zeroshard.precision import cast_floating, dtype_name, dtype_of, squared_norm, tensors_in


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclasses.dataclass
class Record:
    values: Tensor
    note: str = ""


class Plain:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 4096, 10_000, 20_000_000])
def test_squared_norm_is_exact(numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(numel, generator=generator) * 1e-3).to(dtype)
    expected = float(values.double().square().sum())
    # bf16 rows are summed in fp32 one after the other, not pairwise.
    tolerance = 1e-3 if dtype is torch.bfloat16 else 1e-6
    assert float(squared_norm(values)) == pytest.approx(expected, rel=tolerance, abs=1e-30)


def test_inputs_are_cast_wherever_they_are_and_nothing_else_is() -> None:
    whole, part = torch.arange(3), torch.ones(2)
    given = ({"ids": whole, "more": [part, "text"]}, Pair(part, None), Record(part, "note"))
    cast = cast_floating(given, torch.bfloat16)
    assert cast[0]["ids"] is whole
    assert cast[0]["more"][0].dtype is torch.bfloat16
    assert cast[0]["more"][1] == "text"
    assert isinstance(cast[1], Pair)
    assert cast[1].first.dtype is torch.bfloat16
    assert cast[2].values.dtype is torch.bfloat16
    assert cast[2].note == "note"
    assert given[2].values.dtype is torch.float32
    assert cast_floating(given[0], torch.float32) is given[0]


def test_tensors_are_found_in_nested_and_circular_things() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    circle: dict[str, Any] = {"one": one}
    circle["self"] = circle
    found = tensors_in((circle, [Plain({"two": two})], Record(three)))
    assert {id(tensor) for tensor in found} == {id(one), id(two), id(three)}
    assert tensors_in(None) == []
    assert tensors_in(torch.nn.Linear(2, 2)) == []


def test_dtype_names() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        assert dtype_of(dtype_name(dtype)) is dtype
