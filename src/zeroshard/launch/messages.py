"""What the launcher itself has to say: lines on stderr that begin with `zeroshard:`."""

from __future__ import annotations

import logging
import sys

__all__ = ["log", "show_from"]

log = logging.getLogger("zeroshard.launch")


def show_from(level: str) -> None:
    """Show lines from `level` on, on what is stderr now."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("zeroshard: %(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(level.upper())
