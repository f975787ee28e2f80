"""The seam for CPU ranks of one Linux host: peers read each other's memory, sockets say when.

Worked example, 2 ranks, `reduce_scatter` of `full` = 4 elements. Launch: each rank puts the slice that the
other one owns into a block of shared memory and posts READY. `wait()`: each receives the other's READY, sums
its own slice from its `full` and the peer's block, and posts DONE; a DONE lets the owner reuse its block.

Where the input lies decides how it is sent:

* inline: up to 4 KiB travel in the READY message itself; no memory to give back, no DONE;
* staged: ordinary memory is copied to a block at launch. `wait()` does not wait for readers, because they
  read the copy. The block is free when all DONEs have come;
* zero-copy: input that lies in memory of `empty()` is read where it is. The caller may overwrite it once
  `wait()` has returned, so `wait()` returns when all peers have sent DONE. That couples the ranks more
  tightly than staging does, and costs no copy.

In-place use is safe in all of them: in a reduction rank r writes only slice r of its own memory, which only
rank r reads; in a gather a rank writes only what its peers do not read.

No verb changes a tensor's version counter, so autograd does not take a gather for an edit by the user.

A collective is a generator that yields what it has to wait for. Whoever waits, for whichever collective of
whichever group, carries on all that can be carried on; so ranks may wait in different orders.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from zeroshard.comm.arguments import check_flat, check_shard_of, even_cuts, is_same_memory, slice_of_rank
from zeroshard.comm.blocks import Block, BlockPool, bytes_of, elements, map_block
from zeroshard.comm.peers import BLOCK, DONE, FORGET, PART, REACTOR, READY, Message, Peer, encode
from zeroshard.comm.reduction import check_reducible, sum_in_rank_order
from zeroshard.comm.seam import Done, Work
from zeroshard.errors import CommError, DivergedError, RankLostError

__all__ = ["SharedMemoryCollectives"]

_INLINE, _STAGED, _ZERO_COPY = 0, 1, 2
_INLINE_BYTES = 4 << 10
# Below this a copy is cheaper than the second round of messages that zero-copy, or a reduction in two
# phases, takes. Both sides of a collective derive it from the size, so it must be equal on all ranks.
_ONE_ROUND_BYTES = 64 << 10

_VERBS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "close")
_DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}
_AWAITED = {READY: "the launch", PART: "the reduced part", DONE: "the end of reading"}

# Times a waiting rank gives up its core and looks again before it sleeps in the kernel: spares a wake-up when
# the peer is about to answer (40 against 49 us per tiny all_reduce of two ranks).
_YIELDS = 4

_Need = tuple[int, Sequence[int]]  # a kind of message, and the ranks it must come from
_Steps = Generator[_Need, None, None]


class SharedMemoryCollectives:
    """`Collectives` over shared memory; all ranks are processes of one user on one Linux host.

    `connections[r]` is a connected stream socket to rank r of the group (None for the own rank), in the
    hands of this object from now on. `global_ranks` name the ranks in errors; `timeout` is in seconds.

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
        self._rank = rank
        self._size = len(global_ranks)
        self._global_ranks = list(global_ranks)
        self._others = [r for r in range(self._size) if r != rank]
        self._timeout = timeout
        self.about = 0
        """A checksum of what the next collectives are about, which all ranks must share."""
        self._sequence = 0
        self._works: dict[int, _SharedWork] = {}
        self._inboxes: dict[int, dict[int, dict[int, Message]]] = {}
        self._mapped: dict[tuple[int, int], Tensor] = {}
        self._unmapped = ""
        self._closed = False
        itself = weakref.ref(self)  # a group that is dropped without close must not live on in its peers

        def deliver(peer: Peer, message: Message, descriptor: int) -> None:
            group = itself()
            if group is not None:
                group._receive(peer, message, descriptor)

        self._peers = {
            r: Peer(connection, r, _INLINE, deliver)
            for r, connection in enumerate(connections)
            if connection is not None
        }
        self._pool = BlockPool(self._forget)
        with REACTOR.lock:
            for peer in self._peers.values():
                REACTOR.add(peer)

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    def all_gather(self, full: Tensor, shard: Tensor, *, stable: bool = False) -> Work:
        check_shard_of("all_gather", shard, full, self._size)
        return self._launch(0, full, lambda work: self._gather(work, full.data, shard.data, stable))

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Work:
        check_shard_of("reduce_scatter", shard, full, self._size)
        check_reducible("reduce_scatter", full)
        divisor = self._size if average else 1
        return self._launch(1, full, lambda work: self._scatter(work, shard.data, full.data, divisor))

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Work:
        check_flat("all_reduce", tensor)
        check_reducible("all_reduce", tensor)
        divisor = self._size if average else 1
        return self._launch(2, tensor, lambda work: self._reduce(work, tensor.data, divisor))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        check_flat("broadcast", tensor)
        if not 0 <= source < self._size:
            raise CommError(f"broadcast: source is {source}; the group has ranks 0 to {self._size - 1}.")
        self._launch(3, tensor, lambda work: self._broadcast(work, tensor.data, source)).wait()

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
        if device.type != "cpu" or nbytes < _ONE_ROUND_BYTES or self._closed:
            return torch.empty(numel, dtype=dtype, device=device)
        with REACTOR.lock:
            try:
                return self._pool.lend(numel, dtype)
            except OSError:
                return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._launch(4, torch.zeros(1), lambda work: self._barrier(work)).wait()
        finally:
            self._closed = True
            with REACTOR.lock:
                for peer in self._peers.values():
                    REACTOR.remove(peer)
                    peer.close(patience=5.0)
                self._works.clear()
                self._inboxes.clear()
                self._mapped.clear()
                self._pool.close()

    def __del__(self) -> None:
        # No barrier and no lock: this may run anywhere, on one rank alone. Closed sockets tell the peers.
        for peer in getattr(self, "_peers", {}).values():
            if not self._closed:
                REACTOR.remove(peer)
                peer.close()

    # The collectives, as generators that yield what they wait for. They run with the reactor's lock held.

    def _gather(self, work: _SharedWork, full: Tensor, shard: Tensor, stable: bool) -> _Steps:
        work.stable = stable
        work.publish(shard)
        own = slice_of_rank(full, self._rank, self._size)
        if not is_same_memory(own, shard):
            own.copy_(shard)
        yield READY, self._others
        for rank in self._others:
            slice_of_rank(full, rank, self._size).copy_(work.input_of(rank, 0, shard.numel()))
        yield from work.acknowledge()

    def _scatter(self, work: _SharedWork, shard: Tensor, full: Tensor, divisor: int) -> _Steps:
        k = shard.numel()
        own = slice_of_rank(full, self._rank, self._size)
        work.publish(full, [r * k for r in range(self._size + 1)], inline=k * full.itemsize <= _INLINE_BYTES)
        yield READY, self._others
        parts = [own if r == self._rank else work.input_of(r, self._rank * k, k) for r in range(self._size)]
        sum_in_rank_order(shard, parts, divisor)
        yield from work.acknowledge()

    def _reduce(self, work: _SharedWork, tensor: Tensor, divisor: int) -> _Steps:
        if work.nbytes <= _ONE_ROUND_BYTES:
            work.publish(tensor)
            yield READY, self._others
            n = tensor.numel()
            parts = [tensor if r == self._rank else work.input_of(r, 0, n) for r in range(self._size)]
            sum_in_rank_order(tensor, parts, divisor)
            yield from work.acknowledge()
            return
        # Each rank reduces one part, then all copy the others' parts. A rank's PART says as well that it has
        # read its part of everybody's input: from then on that part of the input may be overwritten.
        cuts = even_cuts(tensor.numel(), self._size)
        start, stop = cuts[self._rank], cuts[self._rank + 1]
        work.publish(tensor, cuts, inline=False)
        yield READY, self._others
        own = tensor[start:stop]
        parts = [own if r == self._rank else work.input_of(r, start, stop - start) for r in range(self._size)]
        also = None if work.mode == _ZERO_COPY else work.own_memory(start, stop - start)
        sum_in_rank_order(own, parts, divisor, also)
        work.post(PART)
        yield PART, self._others
        for rank in self._others:
            start, stop = cuts[rank], cuts[rank + 1]
            tensor[start:stop].copy_(work.input_of(rank, start, stop - start))
        yield from work.acknowledge()

    def _broadcast(self, work: _SharedWork, tensor: Tensor, source: int) -> _Steps:
        if self._rank == source:
            work.publish(tensor)
            # Waited for even when staged: nothing else would keep the source from running far ahead.
            if work.mode != _INLINE:
                yield DONE, self._others
        else:
            yield READY, [source]
            tensor.copy_(work.input_of(source, 0, tensor.numel()))
            work.reply(source)

    def _barrier(self, work: _SharedWork) -> _Steps:
        work.post(READY, payload=bytearray())
        yield READY, self._others

    # Launching, receiving, waiting.

    def _launch(self, verb: int, tensor: Tensor, steps: Callable[[_SharedWork], _Steps]) -> Work:
        if self._closed:
            raise CommError(f"{_VERBS[verb]}: these collectives are closed.")
        if tensor.device.type != "cpu":
            raise CommError(f"{_VERBS[verb]}: got a tensor on {tensor.device}; this group moves CPU tensors.")
        if tensor.numel() == 0:
            return Done()
        with REACTOR.lock:
            sequence = self._sequence
            self._sequence += 1
            inbox = self._inboxes.setdefault(sequence, {})
            work = _SharedWork(self, verb, sequence, tensor, inbox)
            self._works[sequence] = work
            work.start(steps(work))
        if work.error is not None:
            raise work.error
        return work

    def _receive(self, peer: Peer, message: Message, descriptor: int) -> None:
        if message.kind == BLOCK:
            try:
                memory = map_block(descriptor, message.nbytes)
                self._mapped[peer.rank, message.block] = torch.frombuffer(memory, dtype=torch.uint8)
            except OSError as error:  # told where the memory is needed, with the name of the collective
                self._unmapped = f"{message.nbytes} bytes of rank {peer.rank} could not be mapped: {error}"
            finally:
                os.close(descriptor)
        elif message.kind == FORGET:
            self._mapped.pop((peer.rank, message.block), None)
        else:
            inbox = self._inboxes.setdefault(message.sequence, {})
            inbox.setdefault(message.kind, {})[peer.rank] = message
            work = self._works.get(message.sequence)
            if work is not None:
                work.advance()

    def _forget(self, block: Block) -> None:
        if block.published:
            data = encode(Message(FORGET, block=block.identity))
            for peer in self._peers.values():
                peer.post(data, urgent=False)

    def _await(self, work: _SharedWork) -> None:
        with REACTOR.lock:
            work.advance()
            give_up = time.monotonic() + self._timeout
            tries = 0
            while not work.finished:
                kind, ranks = work.need
                present = work.inbox.get(kind, ())
                missing = [r for r in ranks if r not in present]
                heard = False
                for rank in missing:
                    heard |= self._peers[rank].receive()
                if work.finished or heard:
                    tries = 0
                    continue
                if tries < _YIELDS:
                    tries += 1
                    os.sched_yield()
                    continue
                lost = [r for r in missing if self._peers[r].lost]
                if lost:
                    self._raise_lost(work, lost)
                if self._closed:
                    raise CommError(f"{work}: these collectives were closed while it was in flight.")
                left = give_up - time.monotonic()
                if left <= 0:
                    self._raise_late(work, missing)
                REACTOR.wait_for_messages(left)
        if work.error is not None:
            raise work.error

    def _raise_lost(self, work: _SharedWork, missing: list[int]) -> NoReturn:
        lost = [self._global_ranks[r] for r in missing]
        names = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {lost}"
        raise RankLostError(
            f"{work}: global {names} closed its end: the process has ended, or has closed this group. "
            "The first error is in the log of that rank."
        )

    def _raise_late(self, work: _SharedWork, missing: list[int]) -> NoReturn:
        late = [self._global_ranks[r] for r in missing]
        raise CommError(
            f"{work}: waited {self._timeout:g} s for {_AWAITED[work.need[0]]} by global ranks {late}. They "
            "are slower than that, stand still, or never launched this collective: compare the ranks' stacks."
        )


class _SharedWork:
    """One collective in flight: its steps, what it waits for, and where its input is published."""

    def __init__(
        self,
        group: SharedMemoryCollectives,
        verb: int,
        sequence: int,
        tensor: Tensor,
        inbox: dict[int, dict[int, Message]],
    ) -> None:
        self.group = group
        self.verb = verb
        self.sequence = sequence
        self.dtype, self.about = tensor.dtype, group.about
        self.nbytes = tensor.numel() * tensor.itemsize
        self.inbox = inbox
        self.mode = _INLINE
        self.stable = False
        self.need: _Need = (0, ())
        self.finished = False
        self.error: Exception | None = None
        self._block: Block | None = None
        self._offset = 0
        self._steps: _Steps | None = None

    def __str__(self) -> str:
        group = self.group
        return (
            f"{_VERBS[self.verb]} of {self.nbytes // self.dtype.itemsize} {self.dtype} "
            f"(number {self.sequence} of the group of global ranks {group._global_ranks}) "
            f"on global rank {group._global_ranks[group._rank]}"
        )

    def wait(self) -> None:
        if not self.finished or self.error is not None:
            self.group._await(self)

    def start(self, steps: _Steps) -> None:
        self._steps = steps
        self._resume()

    def advance(self) -> None:
        """Carry on as far as the messages that have come allow."""
        while not self.finished:
            kind, ranks = self.need
            if len(self.inbox.get(kind, ())) < len(ranks):
                return
            if kind == READY:
                self._check_agreement()
            self._resume()
        self._retire()

    def _resume(self) -> None:
        assert self._steps is not None
        try:
            if self.error is None:
                self.need = next(self._steps)
                return
        except StopIteration:
            pass
        except OSError as error:
            self.error = CommError(
                f"{self}: the host has no room for shared memory: {error}. Free memory, or set "
                "ZEROSHARD_SHARED_MEMORY=0 on all ranks to send through gloo instead."
            )
        except Exception as error:  # raised by the wait for this collective, whoever carried it on
            self.error = error
        self.finished = True
        self._steps = None  # and with it the caller's tensors

    def _check_agreement(self) -> None:
        mine = (self.verb, _DTYPE_CODE[self.dtype], self.nbytes, self.about)
        for rank, message in self.inbox[READY].items():
            if (message.verb, message.dtype, message.nbytes, message.about) != mine:
                dtype = _DTYPES[message.dtype]
                theirs = f"{_VERBS[message.verb]} of {message.nbytes // dtype.itemsize} {dtype}"
                self.error = DivergedError(
                    f"{self}: global rank {self.group._global_ranks[rank]} launched {theirs}"
                    f"{'' if message.about == self.about else ' for other parameters'} instead. All "
                    "ranks of a group launch the same collectives in the same order."
                )

    def _retire(self) -> None:
        """Once nobody reads our memory any more: reuse it, and forget this collective."""
        group = self.group
        if self._block is not None and (self.mode == _STAGED or self.stable):
            if len(self.inbox.get(DONE, ())) < len(group._others):
                return
            if self.mode == _STAGED:
                group._pool.give(self._block)
        self._block = None
        group._works.pop(self.sequence, None)
        group._inboxes.pop(self.sequence, None)

    # Our side: put the input where peers can read it.

    def publish(self, tensor: Tensor, cuts: Sequence[int] = (), *, inline: bool | None = None) -> None:
        """Post READY to all. With `cuts`, rank r reads elements cuts[r]:cuts[r+1] only."""
        group = self.group
        nbytes = tensor.numel() * tensor.itemsize
        if inline if inline is not None else nbytes <= _INLINE_BYTES:
            for rank in group._others:
                part = tensor[cuts[rank] : cuts[rank + 1]] if cuts else tensor
                self.post(READY, to=rank, payload=bytes_of(part))
            return
        found = group._pool.find(tensor) if nbytes > _ONE_ROUND_BYTES else None
        if found is not None and found[1] % tensor.itemsize == 0:
            self.mode = _ZERO_COPY
            self._block, self._offset = found
        else:
            self.mode = _STAGED
            self._block = group._pool.take(nbytes)
            start, stop = (cuts[group._rank], cuts[group._rank + 1]) if cuts else (0, 0)
            for first, last in ((0, start), (stop, tensor.numel())):
                if first < last:
                    self.own_memory(first, last - first).copy_(tensor[first:last])
        if not self._block.published:
            self._block.published = True
            data = encode(Message(BLOCK, block=self._block.identity, nbytes=self._block.nbytes))
            for peer in group._peers.values():
                peer.post(data, self._block, urgent=False)
        self.post(READY)

    def own_memory(self, start: int, count: int) -> Tensor:
        """Elements of what this rank has published."""
        assert self._block is not None
        return elements(self._block.memory, self._offset, start, count, self.dtype)

    def post(
        self, kind: int, *, to: int | None = None, payload: bytearray | None = None, urgent: bool = True
    ) -> None:
        """Send a notice about this collective to one rank, or to all others."""
        message = Message(
            kind,
            self.verb,
            _DTYPE_CODE[self.dtype],
            self.mode,
            0 if self._block is None else self._block.identity,
            self.about,
            self.sequence,
            self._offset if payload is None else len(payload),
            self.nbytes,
            payload,
        )
        data = encode(message)
        peers = self.group._peers
        for peer in peers.values() if to is None else (peers[to],):
            peer.post(data, urgent=urgent)

    # The others' side: read theirs, and say so.

    def input_of(self, rank: int, start: int, count: int) -> Tensor:
        """`count` elements from `start` of rank `rank`'s published memory (all of an inline message)."""
        message = self.inbox[READY][rank]
        if message.payload is not None:
            return torch.frombuffer(message.payload, dtype=self.dtype)
        memory = self.group._mapped.get((rank, message.block))
        if memory is None:
            raise CommError(f"{self}: {self.group._unmapped or 'a block was never announced'}.")
        return elements(memory, message.offset, start, count, self.dtype)

    def reply(self, rank: int) -> None:
        mode = self.inbox[READY][rank].mode
        if mode != _INLINE:
            # A stager needs its block back some time; whoever sent without a copy stands in wait() for this.
            self.post(DONE, to=rank, urgent=mode == _ZERO_COPY or self.verb == 3)

    def acknowledge(self) -> _Steps:
        """Say DONE to all; then, if others read memory the caller may write at once, wait until they have."""
        for rank in self.group._others:
            self.reply(rank)
        if self.mode == _ZERO_COPY and not self.stable:
            yield DONE, self.group._others
