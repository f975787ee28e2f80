"""What others write into a pipe, passed on in whole lines."""

from __future__ import annotations

import fcntl
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Callable

__all__ = ["Relay", "write_out"]

_LONGEST_LINE = 1 << 20  # bytes; what is longer is cut


class Relay:
    """A thread that reads a pipe and gives what comes out of it to `take`, one or more whole lines at a time.

    It ends with the last writer, or after `close`: a process that was left behind may hold the pipe open for ever.
    """

    def __init__(self, source: int, take: Callable[[bytes], None], patience: float | None = None) -> None:
        """`patience`: seconds after which a line is passed on though its end has not come; None: never."""
        self._source = source
        self._take = take
        self._patience = patience
        self._closed, self._open = os.pipe()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What is in the pipe now is the last that is passed on."""
        if self._open >= 0:
            os.close(self._open)
            self._open = -1

    def wait(self, until: float | None = None) -> bool:
        """Wait until all is passed on, but not beyond `until` of the monotonic clock. Whether it is."""
        self._thread.join(None if until is None else max(until - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        waiting = select.poll()
        waiting.register(self._source, select.POLLIN)
        waiting.register(self._closed, select.POLLIN)
        begun, show_at = b"", 0.0  # a line without its end
        left: int | None = None  # bytes until the end, once it is known
        while left is None or left > 0:
            patience = max(show_at - time.monotonic(), 0.0) if begun and self._patience is not None else None
            ready = [fd for fd, _ in waiting.poll(None if patience is None else 1000 * patience)]
            if self._closed in ready:
                waiting.unregister(self._closed)
                left = _bytes_in(self._source)
                continue
            data = os.read(self._source, min(left or 65536, 65536)) if ready else b""
            if ready and not data:
                break
            if left is not None:
                left -= len(data)
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if not end and (patience == 0 or len(begun) > _LONGEST_LINE):
                end = len(data)
            if end or not data:
                self._take(begun + data[:end])
                begun, data = b"", data[end:]
            if not begun:
                show_at = time.monotonic() + (self._patience or 0.0)
            begun += data
        if begun:
            self._take(begun)
        os.close(self._source)
        os.close(self._closed)


def _bytes_in(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def write_out(descriptor: int, data: bytes) -> None:
    """Write all of `data`, or what can be written: whoever reads may have gone, and the ranks go on."""
    rest = memoryview(data)
    try:
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # who gave it to us made it so
                wait_for_room = select.poll()
                wait_for_room.register(descriptor, select.POLLOUT)
                wait_for_room.poll()
    except OSError:
        pass
