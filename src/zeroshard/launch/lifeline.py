"""Ranks on another host end with what started them there.

ssh without a terminal passes no signal on, and a host that is cut off hears nothing at all. So the end of standard
input stops the ranks. A launcher of ours also writes the names of signals into it, one per line, and an empty line
every few seconds: silence means that it, its machine or the network between is gone.
"""

from __future__ import annotations

import os
import select
import signal
import threading

from zeroshard.launch.processes import end_this_process

__all__ = ["BEAT_SECONDS", "hold_lifeline"]

BEAT_SECONDS = 10.0
_SILENCE_SECONDS = 120.0


def hold_lifeline(beats: bool) -> None:
    """Watch standard input in the background, and leave /dev/null in its place for the ranks.

    `beats`: a launcher of ours is at the other end, so that silence is the end, too.
    """
    line = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_watch, args=(line, beats), name="lifeline", daemon=True).start()


def _watch(line: int, beats: bool) -> None:
    rest = b""
    while True:
        ready, _, _ = select.select([line], [], [], _SILENCE_SECONDS if beats else None)
        data = os.read(line, 4096) if ready else b""
        if not data:
            break
        *words, rest = (rest + data).split(b"\n")
        for word in filter(None, words):
            if beats:
                number = signal.Signals[word.decode()]
                end_this_process(number, 128 + number)
    end_this_process(signal.SIGTERM, 128 + signal.SIGTERM)
