"""This process and its children, as the system knows them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["child_processes", "end_this_process", "hangup_stays_ignored", "kill_session"]

_SECONDS_TO_LEAVE = 3.0
_SECONDS_TO_STOP_RANKS = 25.0  # a little more than torchrun's own limit


def child_processes() -> set[int]:
    """Direct children of this process, where the system can say (Linux)."""
    children: set[int] = set()
    for tasks in Path("/proc/self/task").glob("*/children"):
        try:
            children.update(int(pid) for pid in tasks.read_text().split())
        except OSError:  # the thread has ended
            continue
    return children


def kill_session(pid: int) -> None:
    """Kill a rank together with what it started: torchrun gives each rank a session of its own."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_this_process(number: signal.Signals, status: int) -> None:
    """End this process as if the signal came from outside, from a thread; in the end by force.

    Python answers a signal when its main thread comes back from C++, where torch waits for other hosts: before
    ranks start, when there is nothing to end, and after they have ended, for minutes.
    """
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        os._exit(status)
    # To the main thread: if another one took it, the main one would sleep on before it answers.
    signal.pthread_kill(threading.main_thread().ident or 0, number)

    def make_sure() -> None:
        end = time.monotonic() + _SECONDS_TO_STOP_RANKS
        time.sleep(_SECONDS_TO_LEAVE)
        while child_processes() and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(_SECONDS_TO_LEAVE)
        os._exit(status)  # ranks end with this process

    threading.Thread(target=make_sure, name="end", daemon=True).start()


@contextmanager
def hangup_stays_ignored() -> Iterator[None]:
    """Where SIGHUP is ignored, as under nohup, it is blocked as well: torchrun makes a handler for it all the same.

    Entered before any thread is started, so before numpy or torch is imported: threads inherit it, and one that
    did not would hear the signal for the whole process. `child` undoes it for ranks.
    """
    ignored = {number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)  # drops one that has come
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
