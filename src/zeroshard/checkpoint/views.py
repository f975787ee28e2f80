"""Flat shards as `torch.distributed.checkpoint` (DCP) sees them: boxes of the logical tensor.

A rank holds elements `[start, stop)` of a flattened parameter. DCP thinks in N-D boxes, which any world size and
any kind of sharding can be cut from. A flat range is at most `2 * ndim - 1` boxes, each contiguous:

    shape (4, 3), elements 2..10    row 0, column 2 | rows 1 and 2 | row 3, columns 0 and 1
    . . x                           (0, 2) of (1, 1)
    x x x
    x x x                           (1, 0) of (2, 3)
    x x .                           (3, 0) of (1, 2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["Box", "FlatPiece", "PieceLoadPlanner", "PieceSavePlanner", "boxes"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)."""


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes of a row-major tensor of `shape` that hold elements `[start, stop)`, in order of the elements."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    """The whole rows are `[first, last)`."""
    if first > last:
        return _in_row(shape, last, start, stop)
    found = _in_row(shape, first - 1, start, first * row) if start < first * row else []
    if first < last:
        found.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + (_in_row(shape, last, last * row, stop) if last * row < stop else [])


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    """The same within one row of dim 0."""
    begin = row * math.prod(shape[1:])
    inside = boxes(shape[1:], start - begin, stop - begin)
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in inside]


class FlatPiece:
    """Elements `[start, start + values.numel())` of a flattened tensor of `shape`.

    `values` is 1-D and not copied. Implements what DCP looks for in objects that know how to be saved and loaded.
    """

    def __init__(self, shape: Sequence[int], start: int, values: Tensor) -> None:
        self.values = values.detach()
        self._shape, self._start = torch.Size(shape), start
        self._boxes = boxes(shape, start, start + values.numel())
        self._at: dict[torch.Size, tuple[int, int]] = {}
        """Of each box, by its offsets: where its elements begin in `values`, and its place in the list."""
        position = 0
        for place, (offsets, sizes) in enumerate(self._boxes):
            self._at[torch.Size(offsets)] = position, place
            position += math.prod(sizes)

    def on_host(self) -> FlatPiece:
        """A copy in host memory."""
        return FlatPiece(self._shape, self._start, self.values.to("cpu", copy=True))

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self._shape

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.values.dtype), size=self._shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self._boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        position, place = self._at[index.offset]
        sizes = self._boxes[place][1]
        return self.values[position : position + math.prod(sizes)].view(sizes)


class PieceSavePlanner(DefaultSavePlanner):
    """DCP's planner for a flat dict of tensors, `FlatPiece`s, and plain values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, FlatPiece) else found


class PieceLoadPlanner(DefaultLoadPlanner):
    """The same for loading, of tensors and `FlatPiece`s only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        tensor: Tensor = found.__get_tensor_shard__(index) if isinstance(found, FlatPiece) else found
        return tensor
