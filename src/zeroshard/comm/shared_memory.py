"""The seam for CPU ranks of one Linux host: peers read each other's memory, sockets say when.

Worked example, 2 ranks, `reduce_scatter` of `full` = 4 elements. Launch: each rank puts the slice that the
other one owns into a block of shared memory and posts READY. `wait()`: each receives the other's READY, sums
its own slice from its `full` and the peer's block, and posts DONE; a DONE lets the owner reuse its block.

How a rank publishes its input and reads the others' is in `exchange.py`. Each verb here is a list of such steps.

In-place use is safe in all of them: in a reduction rank r writes only slice r of its own memory, which only
rank r reads; in a gather a rank writes only what its peers do not read.

No verb changes a tensor's version counter, so autograd does not take a gather for an edit by the user.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm.arguments import check_flat, check_shard_of, even_cuts, is_same_memory, slice_of_rank
from zeroshard.comm.exchange import (
    INLINE,
    INLINE_BYTES,
    ONE_ROUND_BYTES,
    ZERO_COPY,
    Exchange,
    Steps,
    Transfer,
)
from zeroshard.comm.peers import DONE, PART, REACTOR, READY
from zeroshard.comm.reduction import check_reducible, sum_in_rank_order
from zeroshard.comm.seam import Work
from zeroshard.errors import CommError

__all__ = ["SharedMemoryCollectives"]


class SharedMemoryCollectives:
    """`Collectives` over shared memory; all ranks are processes of one user on one Linux host.

    Sums are in rank order (16 bit types in fp32, rounded once), so all ranks get the same bits, every time.

    Raises `RankLostError` naming the global rank when a peer's process ends; `CommError` when a peer is
    silent for `timeout` seconds, launched a different collective, or the host has no memory to reserve.
    """

    def __init__(
        self,
        rank: int,
        global_ranks: Sequence[int],
        connections: Sequence[socket.socket | None],
        timeout: float,
    ) -> None:
        """See `Exchange`."""
        self.rank, self.size = rank, len(global_ranks)
        self.exchange = Exchange(rank, global_ranks, connections, timeout)
        self._others, self._launch = self.exchange.others, self.exchange.launch

    def all_gather(self, full: Tensor, shard: Tensor, *, stable: bool = False) -> Work:
        check_shard_of("all_gather", shard, full, self.size)
        return self._launch(
            "all_gather", full, lambda work: self._gather(work, full.data, shard.data, stable)
        )

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Work:
        check_shard_of("reduce_scatter", shard, full, self.size)
        check_reducible("reduce_scatter", full)
        divisor = self.size if average else 1
        return self._launch(
            "reduce_scatter", full, lambda work: self._scatter(work, shard.data, full.data, divisor)
        )

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Work:
        check_flat("all_reduce", tensor)
        check_reducible("all_reduce", tensor)
        divisor = self.size if average else 1
        return self._launch("all_reduce", tensor, lambda work: self._reduce(work, tensor.data, divisor))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        check_flat("broadcast", tensor)
        if not 0 <= source < self.size:
            raise CommError(f"broadcast: source is {source}; the group has ranks 0 to {self.size - 1}.")
        self._launch("broadcast", tensor, lambda work: self._broadcast(work, tensor.data, source)).wait()

    def sum_to_host(self, values: Tensor) -> list[float]:
        total = values.detach().clone()
        self.all_reduce(total, average=False).wait()
        return [float(value) for value in total.tolist()]

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised 1-D memory that peers read without a copy.

        Ordinary memory for other devices, for less than 64 KiB, and when the host has no room to reserve.
        The storage cannot be resized. It may outlive `close()`.
        """
        nbytes = numel * dtype.itemsize
        if device.type != "cpu" or nbytes < ONE_ROUND_BYTES or self.exchange.closed:
            return torch.empty(numel, dtype=dtype, device=device)
        with REACTOR.lock:
            try:
                return self.exchange.pool.lend(numel, dtype)
            except OSError:
                return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        if self.exchange.closed:
            return
        try:
            self._launch("close", torch.zeros(1), lambda work: self._barrier(work)).wait()
        finally:
            self.exchange.close()

    # The collectives, as generators that yield what they wait for. They run with the reactor's lock held.

    def _gather(self, work: Transfer, full: Tensor, shard: Tensor, stable: bool) -> Steps:
        work.stable = stable
        work.publish(shard)
        own = slice_of_rank(full, self.rank, self.size)
        if not is_same_memory(own, shard):
            own.copy_(shard)
        yield READY, self._others
        for rank in self._others:
            slice_of_rank(full, rank, self.size).copy_(work.input_of(rank, 0, shard.numel()))
        yield from work.acknowledge()

    def _scatter(self, work: Transfer, shard: Tensor, full: Tensor, divisor: int) -> Steps:
        k = shard.numel()
        own = slice_of_rank(full, self.rank, self.size)
        work.publish(full, [r * k for r in range(self.size + 1)], inline=k * full.itemsize <= INLINE_BYTES)
        yield READY, self._others
        parts = [own if r == self.rank else work.input_of(r, self.rank * k, k) for r in range(self.size)]
        sum_in_rank_order(shard, parts, divisor)
        yield from work.acknowledge()

    def _reduce(self, work: Transfer, tensor: Tensor, divisor: int) -> Steps:
        if work.nbytes <= ONE_ROUND_BYTES:
            work.publish(tensor)
            yield READY, self._others
            n = tensor.numel()
            parts = [tensor if r == self.rank else work.input_of(r, 0, n) for r in range(self.size)]
            sum_in_rank_order(tensor, parts, divisor)
            yield from work.acknowledge()
            return
        # Each rank reduces one part, then all copy the others' parts. A rank's PART says as well that it has
        # read its part of everybody's input: from then on that part of the input may be overwritten.
        cuts = even_cuts(tensor.numel(), self.size)
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        work.publish(tensor, cuts, inline=False)
        yield READY, self._others
        own = tensor[start:stop]
        parts = [own if r == self.rank else work.input_of(r, start, stop - start) for r in range(self.size)]
        also = None if work.mode == ZERO_COPY else work.own_memory(start, stop - start)
        sum_in_rank_order(own, parts, divisor, also)
        work.post(PART)
        yield PART, self._others
        for rank in self._others:
            start, stop = cuts[rank], cuts[rank + 1]
            tensor[start:stop].copy_(work.input_of(rank, start, stop - start))
        yield from work.acknowledge()

    def _broadcast(self, work: Transfer, tensor: Tensor, source: int) -> Steps:
        if self.rank == source:
            work.publish(tensor)
            # Waited for even when staged: nothing else would keep the source from running far ahead.
            if work.mode != INLINE:
                yield DONE, self._others
        else:
            yield READY, [source]
            tensor.copy_(work.input_of(source, 0, tensor.numel()))
            work.reply(source)

    def _barrier(self, work: Transfer) -> Steps:
        work.post(READY, payload=bytearray())
        yield READY, self._others
