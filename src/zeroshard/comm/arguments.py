"""What every implementation of the seam asks of its arguments, checked in one place.

A wrong size would hang or corrupt memory on another rank, far from its cause; here it is named at the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.errors import CommError

__all__ = ["check_flat", "check_shard_of", "even_cuts", "is_same_memory", "slice_of_rank"]


def check_flat(verb: str, tensor: Tensor) -> None:
    """Raise `CommError` unless `tensor` is 1-D and contiguous."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise CommError(
            f"{verb}: got a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}; collectives "
            "take contiguous 1-D tensors. Pass `tensor.view(-1)` of a contiguous tensor."
        )


def check_shard_of(verb: str, shard: Tensor, full: Tensor, size: int) -> None:
    """Raise `CommError` unless `full` is `size` shards long and both agree in dtype and device."""
    check_flat(verb, shard)
    check_flat(verb, full)
    if full.numel() != size * shard.numel():
        raise CommError(
            f"{verb}: full has {full.numel()} elements and shard {shard.numel()}; full must have size*shard "
            f"= {size}*{shard.numel()} = {size * shard.numel()}. Pad full to a multiple of {size}."
        )
    if full.dtype != shard.dtype or full.device != shard.device:
        raise CommError(
            f"{verb}: full is {full.dtype} on {full.device}, shard {shard.dtype} on {shard.device}; "
            "both must be of one dtype on one device."
        )


def slice_of_rank(full: Tensor, rank: int, size: int) -> Tensor:
    """The view of `full` (size*k elements) that belongs to `rank` (k elements)."""
    k = full.numel() // size
    return full[rank * k : (rank + 1) * k]


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors of equal length are the same bytes, which makes a copy needless."""
    if type(a) is not torch.Tensor or type(b) is not torch.Tensor:
        return a is b  # a fake tensor has no address to compare
    return a.data_ptr() == b.data_ptr()


def even_cuts(numel: int, parts: int) -> list[int]:
    """Boundaries of `parts` ranges of `numel` elements, at multiples of 16; the last ranges may be empty.

    >>> even_cuts(100, 3)
    [0, 48, 96, 100]
    """
    length = -(-numel // (parts * 16)) * 16
    return [min(r * length, numel) for r in range(parts + 1)]
