"""Which address and interface of this machine lead to the other hosts."""

from __future__ import annotations

import socket
import struct
import sys

__all__ = ["can_resolve", "interface_of", "is_free", "own_address"]

_SOMEWHERE_ELSE = "192.0.2.1"  # kept free for documentation (RFC 5737); nothing is sent there


def own_address(master: str) -> str | None:
    """The address of this machine that `master` sees. On the master itself: that of the route to the outside."""
    for target in (master, _SOMEWHERE_ELSE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError:
                continue
            address: str = probe.getsockname()[0]
        if not address.startswith("127."):
            return address
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address (Linux)."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def can_resolve(host: str) -> bool:
    """Whether this machine knows an address for `host`."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
