"""Ctrl-C while a command is being imported: one line, and the status that a shell expects.

A KeyboardInterrupt among imports is a long traceback, or is lost in code that passes over every exception, which
torch's is. Nothing heavy is imported here: this is to be there before anything that takes time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["INTERRUPTED", "end_at_once", "held", "raise_again"]

INTERRUPTED = 130
"""The exit status: 128 and SIGINT, as shells have it."""


def end_at_once(name: str) -> None:
    """From here on Ctrl-C ends the process. Where SIGINT is ignored (a job in the background) it stays so until
    `zeroshard run` starts ranks: as torchrun does, it then listens all the same."""

    def end(number: int, frame: FrameType | None) -> None:
        try:
            os.write(2, f"{name}: stopped by SIGINT\n".encode())
        finally:  # whoever closed stderr wants no word, but an end
            os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def raise_again() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, so that what has been begun is put away."""
    if getattr(signal.getsignal(signal.SIGINT), "__module__", None) == __name__:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def held() -> Iterator[None]:
    """For an import in the middle of a command: a Ctrl-C in the block is a KeyboardInterrupt at its end."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
