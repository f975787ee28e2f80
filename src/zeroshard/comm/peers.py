"""Messages between the ranks of one host: sockets, their framing, and one reactor per process.

Bulk data never passes here; it lies in shared memory. What passes are notices of 36 bytes: that memory is
ready, that it was read. The kernel's socket calls order the memory accesses around them on every
architecture, and a peer that dies closes its sockets at once, however it died.

A process may have several groups (gathers, reduces) and wait for them in an order that other ranks do not
share. So one reactor serves all groups: whoever waits, waits for messages of any group, and whatever those
allow is carried on. Sends never block: what the kernel does not take is kept and sent later.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from zeroshard.comm.blocks import Block

__all__ = ["BLOCK", "DONE", "FORGET", "PART", "REACTOR", "READY", "Message", "Peer", "encode"]

BLOCK = 1  # a descriptor comes along: `block` has `nbytes` bytes
READY = 2  # the sender's input of collective `sequence` lies in `block` at `offset`, or follows inline
PART = 3  # the sender's reduced part of it is there as well
DONE = 4  # the sender has read what it needed from the receiver's memory
FORGET = 5  # `block` will not be used again

_HEADER = struct.Struct("<BBBBIIQQQ")
_READ = 64 << 10
_RECEIVE_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_SLICE = 0.05  # seconds in one poll: another thread may have read the message that this one waits for


class Message(NamedTuple):
    kind: int
    verb: int = 0
    dtype: int = 0
    mode: int = 0
    block: int = 0
    about: int = 0
    sequence: int = 0
    offset: int = 0
    nbytes: int = 0
    payload: bytearray | None = None  # inline data, `offset` bytes of it


def encode(message: Message) -> bytes:
    header = _HEADER.pack(*message[:9])
    return header if message.payload is None else header + message.payload


class Peer:
    """The connection to one other rank of one group. Used with the reactor's lock held."""

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        inline_mode: int,
        deliver: Callable[[Peer, Message, int], None],
    ) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.lost = False
        self.number = connection.fileno()
        self._socket = connection
        self._inline_mode = inline_mode
        self._deliver = deliver
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._outbox: deque[tuple[bytes, Block | None]] = deque()

    def post(self, data: bytes, block: Block | None = None, *, urgent: bool = True) -> None:
        """Send encoded messages, with `block`'s descriptor if given; not urgent: along with the next one."""
        self._outbox.append((data, block))
        if urgent:
            self.flush()

    def flush(self) -> bool:
        """Send what the kernel takes; True when nothing is left. A lost peer is found when reading."""
        while self._outbox:
            try:
                data, sent = self._send_first()
            except BlockingIOError:
                REACTOR.flush_later()
                return False
            except OSError:
                self._outbox.clear()
                return True
            if sent < len(data):
                self._outbox.appendleft((data[sent:], None))
        return True

    def _send_first(self) -> tuple[bytes, int]:
        data, block = self._outbox[0]
        if block is not None:
            rights = array.array("i", [block.descriptor])
            sent = self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            self._outbox.popleft()
            return data, sent
        count = 1
        if len(self._outbox) > 1:
            plain = []
            for piece, with_block in self._outbox:
                if with_block is not None:
                    break
                plain.append(piece)
            count, data = len(plain), b"".join(plain)
        sent = self._socket.send(data)
        for _ in range(count):
            self._outbox.popleft()
        return data, sent

    def receive(self) -> bool:
        """Read and deliver what has arrived, without blocking; True if there was anything."""
        if self.lost:
            return False
        anything = False
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _READ, 4, _RECEIVE_FLAGS)
            except BlockingIOError:
                break
            except OSError:
                data, descriptors = b"", []
            anything = True
            self._descriptors.extend(descriptors)
            self._received += data
            if not data:
                self.lost = True
                REACTOR.remove(self)
                break
            if len(data) < _READ and not descriptors:
                break
        for message in self._parse():
            descriptor = self._descriptors.popleft() if message.kind == BLOCK else -1
            self._deliver(self, message, descriptor)
        return anything

    def _parse(self) -> list[Message]:
        messages = []
        buffer, at = self._received, 0
        while len(buffer) - at >= _HEADER.size:
            message = Message(*_HEADER.unpack_from(buffer, at))
            end = at + _HEADER.size
            if message.kind == READY and message.mode == self._inline_mode:
                start, end = end, end + message.offset
                if len(buffer) < end:
                    break
                message = message._replace(payload=buffer[start:end])
            messages.append(message)
            at = end
        if at:
            del buffer[:at]
        return messages

    def close(self, patience: float = 0.0) -> None:
        """Close the connection; first try for `patience` seconds to get rid of what is unsent."""
        give_up = time.monotonic() + patience
        while patience and not self.flush() and time.monotonic() < give_up:
            time.sleep(0.001)
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._outbox.clear()


class _Reactor:
    """All connections of this process, the lock that guards them, and the wait for their messages."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._epoll: select.epoll | None = None
        self._flushing = False

    def add(self, peer: Peer) -> None:
        if self._epoll is None:
            self._epoll = select.epoll()
        self._peers[peer.number] = peer
        self._epoll.register(peer.number, select.EPOLLIN)

    def remove(self, peer: Peer) -> None:
        if self._peers.get(peer.number) is peer and self._epoll is not None:
            del self._peers[peer.number]
            with contextlib.suppress(OSError, ValueError):  # closed already, as when the process ends
                self._epoll.unregister(peer.number)

    def wait_for_messages(self, timeout: float) -> None:
        """With the lock held: let it go until something arrives or `timeout` passes, then deliver."""
        assert self._epoll is not None
        epoll = self._epoll
        self.lock.release()
        try:
            ready = epoll.poll(min(timeout, _SLICE))
        finally:
            self.lock.acquire()
        for number, _ in ready:
            peer = self._peers.get(number)
            if peer is not None:
                peer.receive()

    def flush_later(self) -> None:
        """Finish sends that the kernel refused, in a thread: this rank may compute for long from here on,
        while a peer that is ready to read waits for the rest. Only floods of messages come here."""
        if not self._flushing:
            self._flushing = True
            threading.Thread(target=self._flush_all, name="zeroshard-flush", daemon=True).start()

    def _flush_all(self) -> None:
        while True:
            with self.lock:
                stuck = [peer for peer in list(self._peers.values()) if not peer.flush()]
                if not stuck:
                    self._flushing = False
                    return
                poll = select.poll()
                for peer in stuck:
                    poll.register(peer.number, select.POLLOUT)
            poll.poll(1000)

    def forget_after_fork(self) -> None:
        """In a forked child: close the copies of the connections, lest they outlive the rank itself."""
        for peer in self._peers.values():
            peer.lost = True
            peer.close()
        if self._epoll is not None:
            self._epoll.close()
        self.__init__()  # type: ignore[misc]


REACTOR = _Reactor()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=REACTOR.forget_after_fork)
