"""What the launcher itself has to say: lines on stderr that begin with its name."""

from __future__ import annotations

import contextlib
import logging
import sys

__all__ = ["log", "show_from"]


class _Lines(logging.Handler):
    """Prints to what is stderr at that moment, after the name of the command."""

    name_of_command = "zeroshard"

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            print(f"{self.name_of_command}: {record.getMessage()}", file=sys.stderr, flush=True)


log = logging.getLogger("zeroshard.launch")
_lines = _Lines()
log.addHandler(_lines)
log.propagate = False


def show_from(level: str, name: str = "zeroshard") -> None:
    """Show lines from `level` on, of a command with this name."""
    _lines.name_of_command = name
    log.setLevel(level.upper())
