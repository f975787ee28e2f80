"""Sum over ranks on one CPU core, in pieces that stay in the cache, with the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.errors import CommError

__all__ = ["check_reducible", "sum_in_rank_order"]

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_REDUCIBLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)
_PIECE = 256 << 10  # bytes; 64 KiB and, for 16 bit types, 4 MiB take 1.3 times as long; 1 MiB is the same


def check_reducible(verb: str, tensor: Tensor) -> None:
    """Raise `CommError` for dtypes that have no sum (bool, fp8, complex)."""
    if tensor.dtype not in _REDUCIBLE:
        raise CommError(f"{verb}: {tensor.dtype} cannot be summed over ranks. Reduce in float32 instead.")


def sum_in_rank_order(out: Tensor, parts: Sequence[Tensor], divisor: int, also: Tensor | None = None) -> None:
    """`out = (parts[0] + parts[1] + ...) / divisor`, element by element; `also` gets a copy.

    All are 1-D, of one length and dtype; there are two or more parts, and `out` may be one of them. 16 bit
    types are summed and divided in fp32 and rounded once. Integers are divided towards zero.
    """
    wide = _WIDE.get(out.dtype, out.dtype)
    numel = out.numel()
    step = _PIECE // wide.itemsize
    # `out` may be a later part: only two parts of the same width can be summed into it directly.
    direct = wide == out.dtype and len(parts) == 2
    scratch = None if direct else torch.empty(min(step, numel), dtype=wide)
    if numel <= step:  # views cost more than the sums of short tensors do
        _sum_piece(out, parts, divisor, scratch, also)
        return
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        _sum_piece(
            out[start:stop],
            [part[start:stop] for part in parts],
            divisor,
            None if scratch is None else scratch[: stop - start],
            None if also is None else also[start:stop],
        )


def _sum_piece(
    out: Tensor, parts: Sequence[Tensor], divisor: int, scratch: Tensor | None, also: Tensor | None
) -> None:
    if scratch is None:
        total = torch.add(parts[0], parts[1], out=out)
    else:
        total = _sum(scratch, parts)
    if divisor != 1:
        if total.is_floating_point():
            total.div_(divisor)
        else:
            total.div_(divisor, rounding_mode="trunc")
    if scratch is not None:
        out.copy_(total)
    if also is not None:
        also.copy_(out)


def _sum(total: Tensor, parts: Sequence[Tensor]) -> Tensor:
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part if part.dtype == total.dtype else part.to(total.dtype))
    return total
