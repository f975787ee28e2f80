"""Who carries a collective: torch.distributed as it is, or the seam that engines use.

A carrier makes the tensors of an operation and gives a function that runs it once, to its end as `wait` has it.
Sizes are of the longest tensor, in elements, a multiple of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from zeroshard.comm import Collectives, RecordingCollectives, SharedMemoryCollectives
from zeroshard.comm.bandwidth import OPERATIONS
from zeroshard.comm.torch_backend import all_gather_single, reduce_scatter_single

__all__ = ["Carrier", "SeamCarrier", "TorchCarrier"]

Run = Callable[[], object]


class Carrier(Protocol):
    """Operations over one group of ranks."""

    name: str
    operations: tuple[str, ...]

    def prepare(self, operation: str, numel: int, dtype: torch.dtype, device: torch.device) -> Run:
        """What runs `operation` once, over tensors of its own."""


class TorchCarrier:
    """torch.distributed over the default group. Point to point is a ring: each rank sends to the next one."""

    operations: tuple[str, ...] = OPERATIONS

    def __init__(self, backend: str) -> None:
        self.name = f"torch {backend}"
        self._size, self._rank = dist.get_world_size(), dist.get_rank()

    def prepare(self, operation: str, numel: int, dtype: torch.dtype, device: torch.device) -> Run:
        full = torch.zeros(numel, dtype=dtype, device=device)
        if operation == "all_reduce":
            return lambda: dist.all_reduce(full)
        if operation == "broadcast":
            return lambda: dist.broadcast(full, 0)
        if operation == "all_to_all":
            received = torch.empty_like(full)
            return lambda: dist.all_to_all_single(received, full)
        if operation == "point_to_point":
            return self._ring(full)
        shard = torch.zeros(numel // self._size, dtype=dtype, device=device)
        if operation == "all_gather":
            return lambda: all_gather_single(full, shard)
        return lambda: reduce_scatter_single(shard, full)

    def _ring(self, sent: torch.Tensor) -> Run:
        received = torch.empty_like(sent)
        following, preceding = (self._rank + 1) % self._size, (self._rank - 1) % self._size

        def run() -> None:
            pair = [
                dist.P2POp(dist.isend, sent, following),
                dist.P2POp(dist.irecv, received, preceding),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        return run


class SeamCarrier:
    """`zeroshard.comm` as an engine uses it: memory of its own, sums that are averaged."""

    operations: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")

    def __init__(self, seam: Collectives) -> None:
        inner = seam.inner if isinstance(seam, RecordingCollectives) else seam
        self.name = "shared memory" if isinstance(inner, SharedMemoryCollectives) else "seam"
        self._seam = seam

    def prepare(self, operation: str, numel: int, dtype: torch.dtype, device: torch.device) -> Run:
        seam = self._seam
        full = seam.empty(numel, dtype=dtype, device=device).zero_()
        if operation == "all_reduce":
            return lambda: seam.all_reduce(full, average=True).wait()
        if operation == "broadcast":
            return lambda: seam.broadcast(full, 0)
        shard = seam.empty(numel // seam.size, dtype=dtype, device=device).zero_()
        if operation == "all_gather":
            return lambda: seam.all_gather(full, shard).wait()
        return lambda: seam.reduce_scatter(shard, full, average=True).wait()

    def close(self) -> None:
        self._seam.close()
