"""The collective seam: everything that the engine asks of a process group, and nothing else.

Five verbs. `all_gather`, `reduce_scatter` and `all_reduce` are asynchronous: they return a `Work` whose
`wait()` makes the result visible (on a device with streams: orders the *current stream* after the
collective; on CPU: blocks until the data is there). `broadcast` is synchronous: it is used at set-up only.
`sum_to_host` is synchronous and returns Python numbers: it is the one place where a step reads back from
the device.

Rules every implementation keeps:

* Collectives of one `Collectives` object are launched in the same order on all its ranks. Works may be
  waited in any order after that.
* A tensor handed to a collective is contiguous and 1-D; the caller leaves input and output alone until
  `wait()` returned; after `wait()` returned the caller may overwrite both at once (but see `stable`).
* All ranks pass equal sizes and dtypes.

Worked example, 2 ranks, `full` of 4 elements. `all_gather`: rank 0 has shard [1, 2], rank 1 has [3, 4];
afterwards `full` is [1, 2, 3, 4] on both. `reduce_scatter(..., average=True)`: rank 0 has [1, 1, 1, 1],
rank 1 has [3, 3, 3, 3]; afterwards rank 0's shard is [2, 2] (elements 0-1), rank 1's is [2, 2] (2-3).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Collectives", "Done", "Work"]


class Work(Protocol):
    """A collective that has been launched."""

    def wait(self) -> None:
        """Return once the result may be read (on a stream device: by work queued from now on)."""


class Done:
    """The `Work` of a collective that finished when it was launched."""

    def wait(self) -> None:
        return None


@runtime_checkable
class Collectives(Protocol):
    """One process group, seen through five verbs and an allocator."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def rank(self) -> int:
        """This rank's index in the group, 0 <= rank < size."""

    def all_gather(self, full: Tensor, shard: Tensor, *, stable: bool = False) -> Work:
        """Fill `full` (size*k elements) with every rank's `shard` (k elements), in rank order.

        `shard` may be this rank's own slice `full[rank*k:(rank+1)*k]`: nothing is then copied locally.
        `stable`: the caller promises to leave `shard` alone until all ranks have waited for this gather and a
        later `sum_to_host` of them has returned. Peers may then read it at leisure, and `wait` need not see
        to it that they have.
        """

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Work:
        """Reduce `full` (size*k elements) over ranks; this rank receives its slice in `shard` (k).

        `shard` may be the own slice of `full`. The rest of `full` may be clobbered. Elements are summed,
        and divided by `size` when `average`.
        """

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Work:
        """Sum (or average) `tensor` over ranks, in place."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy rank `source`'s `tensor` to all ranks, in place. Blocks."""

    def sum_to_host(self, values: Tensor) -> list[float]:
        """Element-wise sum of a small float64 vector over ranks, as Python floats. Blocks."""

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised 1-D memory that this seam can send from without a copy of its own.

        An ordinary tensor for most seams. It is an optimisation only: every verb takes any tensor. The
        memory may be reused by a later `empty` once the tensor's last reference is gone.
        """

    def close(self) -> None:
        """Free what the seam holds, after a barrier of the group. Idempotent."""
