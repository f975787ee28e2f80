"""The seam for a group of one rank: no process group, no communication, at most one copy."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm.arguments import check_flat, check_shard_of, is_same_memory
from zeroshard.comm.seam import Done, Work
from zeroshard.errors import CommError

__all__ = ["LocalCollectives"]

_DONE = Done()


class LocalCollectives:
    """All verbs of `Collectives` for size 1; works with no process group initialised at all."""

    rank, size = 0, 1

    def all_gather(self, full: Tensor, shard: Tensor, *, stable: bool = False) -> Work:
        check_shard_of("all_gather", shard, full, 1)
        if not is_same_memory(full, shard):
            full.data.copy_(shard.data)
        return _DONE

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Work:
        check_shard_of("reduce_scatter", shard, full, 1)
        if not is_same_memory(full, shard):
            shard.data.copy_(full.data)
        return _DONE

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Work:
        check_flat("all_reduce", tensor)
        return _DONE

    def broadcast(self, tensor: Tensor, source: int) -> None:
        check_flat("broadcast", tensor)
        if source != 0:
            raise CommError(f"broadcast: source is {source}, but the group has one rank, which is 0.")

    def sum_to_host(self, values: Tensor) -> list[float]:
        check_flat("sum_to_host", values)
        return [float(value) for value in values.tolist()]

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        return None
