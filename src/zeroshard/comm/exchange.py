"""How ranks of one host pass each other their data: published in shared memory, read there, and waited for.

Where the input lies decides how it is sent:

* inline: up to 4 KiB travel in the READY message itself; no memory to give back, no DONE;
* staged: ordinary memory is copied to a block at launch. `wait()` does not wait for readers, because they
  read the copy. The block is free when all DONEs have come;
* zero-copy: input that lies in memory of `empty()` is read where it is. The caller may overwrite it once
  `wait()` has returned, so `wait()` returns when all peers have sent DONE. That couples the ranks more
  tightly than staging does, and costs no copy.

A transfer is a generator that yields what it has to wait for. Whoever waits, for whichever transfer of whichever
group, carries on all that can be carried on; so ranks may wait in different orders.
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

from zeroshard.comm.blocks import Block, BlockPool, bytes_of, elements, map_block
from zeroshard.comm.peers import BLOCK, DONE, FORGET, PART, REACTOR, READY, Message, Peer, encode
from zeroshard.comm.seam import Done, Work
from zeroshard.errors import CommError, DivergedError, RankLostError

__all__ = ["INLINE", "INLINE_BYTES", "ONE_ROUND_BYTES", "ZERO_COPY", "Exchange", "Steps", "Transfer"]

INLINE, STAGED, ZERO_COPY = 0, 1, 2
INLINE_BYTES = 4 << 10
# Below this a copy is cheaper than the second round of messages that zero-copy, or a reduction in two
# phases, takes. Both sides of a collective derive it from the size, so it must be equal on all ranks.
ONE_ROUND_BYTES = 64 << 10

_VERBS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "close")
_DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}
_AWAITED = {READY: "the launch", PART: "the reduced part", DONE: "the end of reading"}

# Times a waiting rank gives up its core and looks again before it sleeps in the kernel: spares a wake-up when
# the peer is about to answer (40 against 49 us per tiny all_reduce of two ranks).
_YIELDS = 4

_Need = tuple[int, Sequence[int]]  # a kind of message, and the ranks it must come from
Steps = Generator[_Need, None, None]


class Exchange:
    """One group's connections, the memory published through them, and the transfers in flight.

    `connections[r]` is a connected stream socket to rank r of the group (None for the own rank), in the
    hands of this object from now on. `global_ranks` name the ranks in errors; `timeout` is in seconds.
    """

    def __init__(
        self,
        rank: int,
        global_ranks: Sequence[int],
        connections: Sequence[socket.socket | None],
        timeout: float,
    ) -> None:
        self.rank = rank
        self.size = len(global_ranks)
        self.global_ranks = list(global_ranks)
        self.others = [r for r in range(self.size) if r != rank]
        self.timeout = timeout
        self.about = 0
        """A checksum of what the next transfers are about, which all ranks must share."""
        self._sequence = 0
        self.works: dict[int, Transfer] = {}
        self.inboxes: dict[int, dict[int, dict[int, Message]]] = {}
        self.mapped: dict[tuple[int, int], Tensor] = {}
        self.unmapped = ""
        self.closed = False
        itself = weakref.ref(self)  # a group that is dropped without close must not live on in its peers

        def deliver(peer: Peer, message: Message, descriptor: int) -> None:
            exchange = itself()
            if exchange is not None:
                exchange._receive(peer, message, descriptor)

        self.peers = {
            r: Peer(connection, r, INLINE, deliver)
            for r, connection in enumerate(connections)
            if connection is not None
        }
        self.pool = BlockPool(self._forget)
        with REACTOR.lock:
            for peer in self.peers.values():
                REACTOR.add(peer)

    def close(self) -> None:
        self.closed = True
        with REACTOR.lock:
            for peer in self.peers.values():
                REACTOR.remove(peer)
                peer.close(patience=5.0)
            self.works.clear()
            self.inboxes.clear()
            self.mapped.clear()
            self.pool.close()

    def __del__(self) -> None:
        # No barrier and no lock: this may run anywhere, on one rank alone. Closed sockets tell the peers.
        for peer in getattr(self, "peers", {}).values():
            if not self.closed:
                REACTOR.remove(peer)
                peer.close()

    def launch(self, verb: str, tensor: Tensor, steps: Callable[[Transfer], Steps]) -> Work:
        """Start a transfer of `tensor`; `steps` are run with the reactor's lock held."""
        if self.closed:
            raise CommError(f"{verb}: these collectives are closed.")
        if tensor.device.type != "cpu":
            raise CommError(f"{verb}: got a tensor on {tensor.device}; this group moves CPU tensors.")
        if tensor.numel() == 0:
            return Done()
        with REACTOR.lock:
            sequence = self._sequence
            self._sequence += 1
            inbox = self.inboxes.setdefault(sequence, {})
            work = Transfer(self, verb, sequence, tensor, inbox)
            self.works[sequence] = work
            work.start(steps(work))
        if work.error is not None:
            raise work.error
        return work

    def _receive(self, peer: Peer, message: Message, descriptor: int) -> None:
        if message.kind == BLOCK:
            try:
                memory = map_block(descriptor, message.nbytes)
                self.mapped[peer.rank, message.block] = torch.frombuffer(memory, dtype=torch.uint8)
            except OSError as error:  # told where the memory is needed, with the name of the collective
                self.unmapped = f"{message.nbytes} bytes of rank {peer.rank} could not be mapped: {error}"
            finally:
                os.close(descriptor)
        elif message.kind == FORGET:
            self.mapped.pop((peer.rank, message.block), None)
        else:
            inbox = self.inboxes.setdefault(message.sequence, {})
            inbox.setdefault(message.kind, {})[peer.rank] = message
            work = self.works.get(message.sequence)
            if work is not None:
                work.advance()

    def _forget(self, block: Block) -> None:
        if block.published:
            data = encode(Message(FORGET, block=block.identity))
            for peer in self.peers.values():
                peer.post(data, urgent=False)

    def wait_for(self, work: Transfer) -> None:
        with REACTOR.lock:
            work.advance()
            give_up = time.monotonic() + self.timeout
            tries = 0
            while not work.finished:
                kind, ranks = work.need
                present = work.inbox.get(kind, ())
                missing = [r for r in ranks if r not in present]
                heard = False
                for rank in missing:
                    heard |= self.peers[rank].receive()
                if work.finished or heard:
                    tries = 0
                    continue
                if tries < _YIELDS:
                    tries += 1
                    os.sched_yield()
                    continue
                lost = [r for r in missing if self.peers[r].lost]
                if lost:
                    self._raise_lost(work, lost)
                if self.closed:
                    raise CommError(f"{work}: these collectives were closed while it was in flight.")
                left = give_up - time.monotonic()
                if left <= 0:
                    self._raise_late(work, missing)
                REACTOR.wait_for_messages(left)
        if work.error is not None:
            raise work.error

    def _raise_lost(self, work: Transfer, missing: list[int]) -> NoReturn:
        lost = [self.global_ranks[r] for r in missing]
        names = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {lost}"
        raise RankLostError(
            f"{work}: global {names} closed its end: the process has ended, or has closed this group. "
            "The first error is in the log of that rank."
        )

    def _raise_late(self, work: Transfer, missing: list[int]) -> NoReturn:
        late = [self.global_ranks[r] for r in missing]
        raise CommError(
            f"{work}: waited {self.timeout:g} s for {_AWAITED[work.need[0]]} by global ranks {late}. They "
            "are slower than that, stand still, or never launched this collective: compare the ranks' stacks."
        )


class Transfer:
    """One collective in flight: its steps, what it waits for, and where its input is published."""

    def __init__(
        self,
        exchange: Exchange,
        verb: str,
        sequence: int,
        tensor: Tensor,
        inbox: dict[int, dict[int, Message]],
    ) -> None:
        self.exchange = exchange
        self.verb = verb
        self.sequence = sequence
        self.dtype, self.about = tensor.dtype, exchange.about
        self.nbytes = tensor.numel() * tensor.itemsize
        self.inbox = inbox
        self.mode = INLINE
        self.stable = False
        self.need: _Need = (0, ())
        self.finished = False
        self.error: Exception | None = None
        self._block: Block | None = None
        self._offset = 0
        self._steps: Steps | None = None

    def __str__(self) -> str:
        exchange = self.exchange
        return (
            f"{self.verb} of {self.nbytes // self.dtype.itemsize} {self.dtype} "
            f"(number {self.sequence} of the group of global ranks {exchange.global_ranks}) "
            f"on global rank {exchange.global_ranks[exchange.rank]}"
        )

    def wait(self) -> None:
        if not self.finished or self.error is not None:
            self.exchange.wait_for(self)

    def start(self, steps: Steps) -> None:
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
        mine = (_VERBS.index(self.verb), _DTYPE_CODE[self.dtype], self.nbytes, self.about)
        for rank, message in self.inbox[READY].items():
            if (message.verb, message.dtype, message.nbytes, message.about) != mine:
                dtype = _DTYPES[message.dtype]
                theirs = f"{_VERBS[message.verb]} of {message.nbytes // dtype.itemsize} {dtype}"
                self.error = DivergedError(
                    f"{self}: global rank {self.exchange.global_ranks[rank]} launched {theirs}"
                    f"{'' if message.about == self.about else ' for other parameters'} instead. All "
                    "ranks of a group launch the same collectives in the same order."
                )

    def _retire(self) -> None:
        """Once nobody reads our memory any more: reuse it, and forget this collective."""
        exchange = self.exchange
        if self._block is not None and (self.mode == STAGED or self.stable):
            if len(self.inbox.get(DONE, ())) < len(exchange.others):
                return
            if self.mode == STAGED:
                exchange.pool.give(self._block)
        self._block = None
        exchange.works.pop(self.sequence, None)
        exchange.inboxes.pop(self.sequence, None)

    # Our side: put the input where peers can read it.

    def publish(self, tensor: Tensor, cuts: Sequence[int] = (), *, inline: bool | None = None) -> None:
        """Post READY to all. With `cuts`, rank r reads elements cuts[r]:cuts[r+1] only."""
        exchange = self.exchange
        nbytes = tensor.numel() * tensor.itemsize
        if inline if inline is not None else nbytes <= INLINE_BYTES:
            for rank in exchange.others:
                part = tensor[cuts[rank] : cuts[rank + 1]] if cuts else tensor
                self.post(READY, to=rank, payload=bytes_of(part))
            return
        found = exchange.pool.find(tensor) if nbytes > ONE_ROUND_BYTES else None
        if found is not None and found[1] % tensor.itemsize == 0:
            self.mode = ZERO_COPY
            self._block, self._offset = found
        else:
            self.mode = STAGED
            self._block = exchange.pool.take(nbytes)
            start, stop = (cuts[exchange.rank], cuts[exchange.rank + 1]) if cuts else (0, 0)
            for first, last in ((0, start), (stop, tensor.numel())):
                if first < last:
                    self.own_memory(first, last - first).copy_(tensor[first:last])
        if not self._block.published:
            self._block.published = True
            data = encode(Message(BLOCK, block=self._block.identity, nbytes=self._block.nbytes))
            for peer in exchange.peers.values():
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
            _VERBS.index(self.verb),
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
        peers = self.exchange.peers
        for peer in peers.values() if to is None else (peers[to],):
            peer.post(data, urgent=urgent)

    # The others' side: read theirs, and say so.

    def input_of(self, rank: int, start: int, count: int) -> Tensor:
        """`count` elements from `start` of rank `rank`'s published memory (all of an inline message)."""
        message = self.inbox[READY][rank]
        if message.payload is not None:
            return torch.frombuffer(message.payload, dtype=self.dtype)
        memory = self.exchange.mapped.get((rank, message.block))
        if memory is None:
            raise CommError(f"{self}: {self.exchange.unmapped or 'a block was never announced'}.")
        return elements(memory, message.offset, start, count, self.dtype)

    def reply(self, rank: int) -> None:
        mode = self.inbox[READY][rank].mode
        if mode != INLINE:
            # A stager needs its block back some time; whoever sent without a copy stands in wait() for this.
            self.post(DONE, to=rank, urgent=mode == ZERO_COPY or self.verb == "broadcast")

    def acknowledge(self) -> Steps:
        """Say DONE to all; then, if others read memory the caller may write at once, wait until they have."""
        for rank in self.exchange.others:
            self.reply(rank)
        if self.mode == ZERO_COPY and not self.stable:
            yield DONE, self.exchange.others
