"""This process and its children, as the system knows them."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroshard.errors import LaunchError

__all__ = [
    "child_processes",
    "end_children",
    "end_this_process",
    "hangup_stays_ignored",
    "heir_of_orphans",
    "kill_session",
    "room_for_files",
]

_FILES_OF_ITS_OWN = 64  # of a launcher, whatever it starts
_PR_SET_CHILD_SUBREAPER = 36
_SECONDS_BETWEEN_BURIALS = 10.0
_SECONDS_TO_LISTEN = 3.0  # for what a rank has left behind
_SECONDS_TO_DIE = 5.0  # a process within a system call may not die at all
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


@contextmanager
def heir_of_orphans() -> Iterator[None]:
    """Within it, what a child has started becomes a child of this process when that child ends (Linux).

    So nothing that a rank started is out of reach, whatever session it has given itself.
    """
    if sys.platform != "linux":
        yield
        return
    over = threading.Event()
    burials = threading.Thread(target=_bury_orphans, args=(over,), name="burials", daemon=True)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    burials.start()
    try:
        yield
    finally:
        over.set()
        burials.join()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _bury_orphans(over: threading.Event) -> None:
    """Nobody else asks how orphans have ended, and in a job of weeks there may be many.

    Those that lead a group of their own stay until the end: from outside they look like a rank, whose exit status
    is torch's to read.
    """
    while not over.wait(_SECONDS_BETWEEN_BURIALS):
        for pid in child_processes():
            with suppress(ProcessLookupError, ChildProcessError):
                if os.getpgid(pid) not in (pid, os.getpgid(0)):
                    os.waitpid(pid, os.WNOHANG)


def end_children(spared: set[int], seconds: float = _SECONDS_TO_LISTEN) -> None:
    """End all children of this process but the spared ones, and what they leave behind: SIGTERM, then SIGKILL."""
    told: set[int] = set()
    kill_at = time.monotonic() + seconds
    while (left := child_processes() - spared) and time.monotonic() < kill_at + _SECONDS_TO_DIE:
        killing = time.monotonic() >= kill_at
        for pid in left if killing else left - told:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if killing else signal.SIGTERM)
        told |= left
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def kill_session(pid: int) -> None:
    """Kill a child that leads a session, together with what is in that session."""
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
        end_children(set(), seconds=0.0)
        os._exit(status)

    threading.Thread(target=make_sure, name="end", daemon=True).start()


@contextmanager
def hangup_stays_ignored() -> Iterator[None]:
    """Where SIGHUP is ignored, as under nohup, it is blocked as well: torchrun makes a handler for it all the same.

    Entered before any thread is started, so before numpy or torch is imported: threads inherit it, and one that
    did not would hear the signal for the whole process. `child` undoes it for ranks.
    """
    if sys.platform == "win32":
        yield
        return
    ignored = {number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)  # drops one that has come
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def room_for_files(each: int, count: int, what: str) -> Iterator[None]:
    """Within it this process, and what it starts, may open `each` files for each of `count` ranks or hosts
    (`what`), or as many as the system allows.

    Raises:
        LaunchError: these were too few.
    """
    import resource  # of POSIX; `zeroshard --help` does without

    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = each * count + _FILES_OF_ITS_OWN
    allowed = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    if before != resource.RLIM_INFINITY and before < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise LaunchError(
            f"{count} {what} need about {wanted} open files, and {most} are allowed here; raise that limit "
            f"(nofile in /etc/security/limits.conf, LimitNOFILE of systemd), or start fewer {what}"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
