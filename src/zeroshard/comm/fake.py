"""A seam that moves nothing: for planning at sizes nobody has, and for tests of what the engine asks."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm.arguments import check_flat, check_shard_of
from zeroshard.comm.seam import Done, Work

__all__ = ["FakeCollectives"]

_DONE = Done()


class FakeCollectives:
    """`Collectives` as rank `rank` of `size` that records calls and touches no data.

    `calls` has (verb, numel, dtype) in launch order, numel being that of the longest tensor (`full`). It
    works under FakeTensorMode: no tensor is read, `sum_to_host` answers for each value as if it were 1 on all
    ranks: `size`, or `world` where this group is the last of several that sum one after the other.
    """

    def __init__(self, rank: int, size: int, world: int | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in a group of {size}: 0 <= rank < size")
        self.rank, self.size = rank, size
        self._world = size if world is None else world
        self.calls: list[tuple[str, int, torch.dtype]] = []

    def all_gather(self, full: Tensor, shard: Tensor, *, stable: bool = False) -> Work:
        check_shard_of("all_gather", shard, full, self.size)
        self.calls.append(("all_gather", full.numel(), full.dtype))
        return _DONE

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Work:
        check_shard_of("reduce_scatter", shard, full, self.size)
        self.calls.append(("reduce_scatter", full.numel(), full.dtype))
        return _DONE

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Work:
        check_flat("all_reduce", tensor)
        self.calls.append(("all_reduce", tensor.numel(), tensor.dtype))
        return _DONE

    def broadcast(self, tensor: Tensor, source: int) -> None:
        check_flat("broadcast", tensor)
        self.calls.append(("broadcast", tensor.numel(), tensor.dtype))

    def sum_to_host(self, values: Tensor) -> list[float]:
        self.calls.append(("sum_to_host", values.numel(), values.dtype))
        return [float(self._world)] * values.numel()

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        return None
