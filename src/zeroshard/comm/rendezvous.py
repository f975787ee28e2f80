"""How the ranks of one host find and connect to each other, for `SharedMemoryCollectives`.

Each rank listens on an abstract socket (a name of the kernel's choice, in no file system) and tells the
others through the process group. Rank r connects to all lower ranks and accepts all higher ones. A secret
of 16 random bytes, told through the group as well, keeps strangers out: abstract names have no permissions.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.comm.blocks import Block

__all__ = ["Listener", "Offer", "connect_all", "host_fingerprint"]

_GREETING = struct.Struct("<16sI")
_TRIAL_BYTES = 1 << 20


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others: why it cannot use shared memory, or where it can be reached.

    `expected` marks a reason that is no cause for a warning (the user's choice, a system without memfd).
    """

    reason: str = ""
    expected: bool = False
    fingerprint: tuple[str, ...] = ()
    address: bytes = b""
    secret: bytes = b""


def host_fingerprint() -> tuple[str, ...]:
    """Equal on two ranks only if they can reach each other's sockets and map each other's memory."""
    parts = [socket.gethostname(), str(os.getuid())]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts.append(file.read().strip())
    for namespace in ("net", "pid", "user"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{namespace}"))
    return tuple(parts)


class Listener:
    """This rank's end of the rendezvous: an `offer` for the others, and a listening socket if it can."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.offer = self._make_offer()

    def _make_offer(self) -> Offer:
        if os.environ.get("ZEROSHARD_SHARED_MEMORY", "1") == "0":
            return Offer("ZEROSHARD_SHARED_MEMORY=0 is set", expected=True)
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            return Offer(f"{sys.platform} has no memfd", expected=True)
        try:
            Block(0, _TRIAL_BYTES).close()
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind("")  # Linux picks a free abstract name
            listening.listen(128)
        except OSError as error:
            return Offer(f"shared memory cannot be reserved: {error}")
        self.socket = listening
        address = listening.getsockname()
        assert isinstance(address, bytes)
        return Offer("", False, host_fingerprint(), address, secrets.token_bytes(16))

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()


def connect_all(
    rank: int, offers: Sequence[Offer], listener: Listener, timeout: float
) -> list[socket.socket | None]:
    """A connected socket to every other rank, by rank. Raises `OSError` (a time-out too) when one fails."""
    assert listener.socket is not None
    deadline = time.monotonic() + timeout
    connections: list[socket.socket | None] = [None] * len(offers)
    try:
        for other in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connections[other] = connection
            connection.settimeout(timeout)
            connection.connect(offers[other].address)
            connection.sendall(_GREETING.pack(offers[other].secret, rank))
        while None in (connections[r] for r in range(rank + 1, len(offers))):
            listener.socket.settimeout(max(0.001, deadline - time.monotonic()))
            connection, _ = listener.socket.accept()
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            greeting = connection.recv(_GREETING.size, socket.MSG_WAITALL)
            secret, other = _GREETING.unpack(greeting.ljust(_GREETING.size, b"\0"))
            known = secrets.compare_digest(secret, listener.offer.secret)
            if known and rank < other < len(offers) and connections[other] is None:
                connections[other] = connection
            else:
                connection.close()
    except OSError:
        for open_connection in connections:
            if open_connection is not None:
                open_connection.close()
        raise
    return connections
