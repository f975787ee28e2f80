"""The seam over `torch.distributed`: any backend, any device, any number of hosts.

What differs between backends and torch releases is decided in this file and nowhere else:

* names: torch 2.13 deprecated `all_gather_into_tensor` and `reduce_scatter_tensor`;
* average: nccl divides while it reduces, other backends sum and the division follows in `wait()`;
* reduce_scatter on gloo: an all_reduce of `full`, then a copy of the own slice. gloo's reduce_scatter is
  slower than its all_reduce of the same buffer (64 MiB fp32, two cores: 140 against 78 ms with 2 ranks,
  332 against 210 ms with 4; bf16 101 against 70 ms), and the seam allows `full` to be clobbered;
* dtypes: gloo moves and sums fp32, fp64, fp16, bf16, int8, int32, int64 and uint8. Others (fp8, bool, int16)
  are gathered and broadcast as bytes, which is exact, and cannot be reduced.

Collectives see `.data`: no verb changes a tensor's version counter, so autograd does not take a gather for an
edit by the user.

gloo sums 16 bit types in 16 bits. That is kept: a sum in fp32 costs twice the bytes and, measured, twice the
time (136 against 70 ms). Callers who want fp32 sums pass fp32 (`communication_data_type`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.arguments import check_flat, check_shard_of, is_same_memory, slice_of_rank
from zeroshard.comm.reduction import check_reducible
from zeroshard.comm.seam import Work
from zeroshard.errors import CommError, RankLostError

__all__ = ["TorchCollectives", "all_gather_single", "reduce_scatter_single"]

all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

_MOVED_AS_THEY_ARE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.uint8,
    }
)

# What gloo and nccl say when the other end is gone, as opposed to slow or misused.
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|connection reset|broken pipe|connection refused|remote process exited"
    r"|no longer alive|socket closed",
    re.IGNORECASE,
)


class TorchCollectives:
    """`Collectives` over one `torch.distributed` process group.

    A failure raises `RankLostError` when the backend says that a peer closed its end, else `CommError`
    (time-out, misuse); both name the verb and the group. The backend does not say which peer it was.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        if rank < 0:
            raise CommError(
                f"this process (global rank {dist.get_rank()}) is not in the group of global ranks "
                f"{dist.get_process_group_ranks(group)}. Open collectives on the ranks of the group only."
            )
        self._group = group
        self._global_ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = rank, len(self._global_ranks)
        self._backend_of_device: dict[str, str] = {}
        self._closed = False

    def all_gather(self, full: Tensor, shard: Tensor, *, stable: bool = False) -> Work:
        check_shard_of("all_gather", shard, full, self.size)
        full, shard = _as_movable(full.data), _as_movable(shard.data)
        return self._launch(
            "all_gather", lambda: all_gather_single(full, shard, group=self._group, async_op=True)
        )

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Work:
        check_shard_of("reduce_scatter", shard, full, self.size)
        check_reducible("reduce_scatter", full)
        shard, full = shard.data, full.data
        if self._backend(full) == "gloo":
            own = slice_of_rank(full, self.rank, self.size)

            def finish() -> None:
                if not is_same_memory(own, shard):
                    shard.copy_(own)
                if average:
                    _divide(shard, self.size)

            return self._launch(
                "reduce_scatter", lambda: dist.all_reduce(full, group=self._group, async_op=True), finish
            )
        op, divide = self._reduction(full, average)
        return self._launch(
            "reduce_scatter",
            lambda: reduce_scatter_single(shard, full, op=op, group=self._group, async_op=True),
            (lambda: _divide(shard, self.size)) if divide else None,
        )

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Work:
        check_flat("all_reduce", tensor)
        check_reducible("all_reduce", tensor)
        tensor = tensor.data
        op, divide = self._reduction(tensor, average)
        return self._launch(
            "all_reduce",
            lambda: dist.all_reduce(tensor, op=op, group=self._group, async_op=True),
            (lambda: _divide(tensor, self.size)) if divide else None,
        )

    def broadcast(self, tensor: Tensor, source: int) -> None:
        check_flat("broadcast", tensor)
        if not 0 <= source < self.size:
            raise CommError(f"broadcast: source is {source}; the group has ranks 0 to {self.size - 1}.")
        moved = _as_movable(tensor.data)
        from_rank = self._global_ranks[source]
        self._launch(
            "broadcast", lambda: dist.broadcast(moved, from_rank, group=self._group, async_op=True)
        ).wait()

    def sum_to_host(self, values: Tensor) -> list[float]:
        check_flat("sum_to_host", values)
        total = values.detach().clone()
        self._launch("sum_to_host", lambda: dist.all_reduce(total, group=self._group, async_op=True)).wait()
        return [float(value) for value in total.tolist()]

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """Wait for all ranks; the process group itself belongs to whoever made it."""
        if self._closed:
            return
        self._closed = True
        self._launch("close", lambda: dist.barrier(group=self._group, async_op=True)).wait()

    def _backend(self, tensor: Tensor) -> str:
        kind = tensor.device.type
        name = self._backend_of_device.get(kind)
        if name is None:
            name = self._group._get_backend(tensor.device).name().lower()
            self._backend_of_device[kind] = name
        return name

    def _reduction(self, tensor: Tensor, average: bool) -> tuple[Any, bool]:
        """The operation to launch, and whether a division must follow it."""
        if average and self._backend(tensor) == "nccl":
            return dist.ReduceOp.AVG, False
        return dist.ReduceOp.SUM, average

    def _launch(
        self, verb: str, launch: Callable[[], Any], finish: Callable[[], None] | None = None
    ) -> _TorchWork:
        try:
            return _TorchWork(self, verb, launch(), finish)
        except RuntimeError as error:
            raise self.failure(verb, error) from error

    def failure(self, verb: str, error: Exception) -> CommError:
        """The error of this package for what torch raised in `verb`."""
        text = str(error).strip()
        own = self._global_ranks[self.rank]
        where = f"{verb} on global rank {own} of the group of global ranks {self._global_ranks}"
        if _PEER_GONE.search(text):
            return RankLostError(
                f"{where}: a peer closed its end. Look at the other ranks' logs for the first error. ({text})"
            )
        return CommError(
            f"{where} failed: {text}. If this is a time-out, one rank did not launch the same collective: "
            "compare the ranks' stacks."
        )


class _TorchWork:
    """A launched `torch.distributed` work and what must follow it. `finish` runs once."""

    def __init__(
        self, owner: TorchCollectives, verb: str, handle: Any, finish: Callable[[], None] | None
    ) -> None:
        self._owner = owner
        self._verb = verb
        self._handle = handle
        self._finish = finish

    def wait(self) -> None:
        if self._handle is not None:
            try:
                self._handle.wait()
            except RuntimeError as error:
                raise self._owner.failure(self._verb, error) from error
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


def _as_movable(tensor: Tensor) -> Tensor:
    """The tensor, or a view of its bytes where the backends do not know its dtype."""
    return tensor if tensor.dtype in _MOVED_AS_THEY_ARE else tensor.view(torch.uint8)


def _divide(tensor: Tensor, size: int) -> None:
    """Divide in place; integers are divided towards zero."""
    if tensor.dtype.is_floating_point:
        tensor.div_(size)
    else:
        tensor.div_(size, rounding_mode="trunc")
