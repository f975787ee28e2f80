"""A flat range as boxes, and DCP's round trip over them."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from zeroshard.checkpoint.views import FlatPiece, boxes


@st.composite
def ranges(draw: Any) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
@settings(max_examples=300)
def test_boxes_hold_the_range_in_order_and_are_few(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole = torch.arange(math.prod(shape)).view(shape)
    found = boxes(shape, start, stop)
    parts = [
        whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
        for offsets, sizes in found
    ]
    assert torch.equal(torch.cat([*parts, torch.empty(0, dtype=torch.int64)]), torch.arange(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


@given(ranges())
@settings(max_examples=100)
def test_a_piece_gives_each_box_as_a_view_of_its_values(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    values = torch.arange(start, stop).float()
    piece = FlatPiece(shape, start, values)
    for chunk in piece.__create_chunk_list__():
        part = piece.__get_tensor_shard__(MetadataIndex("name", chunk.offsets))
        assert part.shape == chunk.sizes
        part.zero_()
    assert not values.any()
    assert piece.size() == torch.Size(shape)


def test_the_worked_example() -> None:
    assert boxes((4, 3), 2, 11) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    assert boxes((4, 3), 4, 5) == [((1, 1), (1, 1))]
    assert boxes((), 0, 1) == [((), ())]
    assert boxes((5,), 3, 3) == []
