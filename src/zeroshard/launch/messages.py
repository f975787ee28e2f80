"""What the launcher itself has to say: lines on stderr that begin with `zeroshard:`."""

from __future__ import annotations

import contextlib
import logging
import sys

__all__ = ["log", "show_from"]


class _Lines(logging.Handler):
    """Prints to what is stderr at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            print(f"zeroshard: {record.getMessage()}", file=sys.stderr, flush=True)


log = logging.getLogger("zeroshard.launch")
log.addHandler(_Lines())
log.propagate = False


def show_from(level: str) -> None:
    """Show lines from `level` on."""
    log.setLevel(level.upper())
