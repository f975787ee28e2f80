"""Counts what an engine sends: calls, bytes of the buffers, bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zeroshard.comm.bandwidth import sent_share
from zeroshard.comm.seam import Collectives, Work

__all__ = ["CountingCollectives", "Traffic"]


@dataclass(frozen=True)
class Traffic:
    """What one verb moved.

    `buffer_bytes`: of the longest tensor of each call (`full`, or the one tensor). `wire_bytes`: what each
    rank sends at least (`bandwidth.sent_share`), rounded down per call.

    Example: all_gather of a `full` of 1000 bytes on 4 ranks counts 1000 and 750. Shared memory on one host
    sends nothing over a wire; the convention stays the same, so that figures compare.
    """

    calls: int = 0
    buffer_bytes: int = 0
    wire_bytes: int = 0


class CountingCollectives:
    """`inner` with counters around it: `counts()` by verb since the start or the last `reset()`."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self._traffic: dict[str, Traffic] = {}

    def counts(self) -> dict[str, Traffic]:
        return dict(self._traffic)

    def reset(self) -> None:
        self._traffic.clear()

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def rank(self) -> int:
        return self._inner.rank

    def all_gather(self, full: Tensor, shard: Tensor, *, stable: bool = False) -> Work:
        self._count("all_gather", full)
        return self._inner.all_gather(full, shard, stable=stable)

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Work:
        self._count("reduce_scatter", full)
        return self._inner.reduce_scatter(shard, full, average=average)

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Work:
        self._count("all_reduce", tensor)
        return self._inner.all_reduce(tensor, average=average)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._count("broadcast", tensor)
        self._inner.broadcast(tensor, source)

    def sum_to_host(self, values: Tensor) -> list[float]:
        self._count("sum_to_host", values)
        return self._inner.sum_to_host(values)

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._inner.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        self._inner.close()

    def _count(self, verb: str, tensor: Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        before = self._traffic.get(verb, Traffic())
        self._traffic[verb] = replace(
            before,
            calls=before.calls + 1,
            buffer_bytes=before.buffer_bytes + nbytes,
            wire_bytes=before.wire_bytes + int(nbytes * sent_share(verb, self._inner.size)),
        )
