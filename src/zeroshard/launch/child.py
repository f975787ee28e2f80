"""Between a launcher and a program: `python child.py SIGNAL PARENT LOCAL_RANK CORES -- program...`.

Becomes the program, in the same process, after three things that are inherited: it gets SIGNAL when PARENT, which
started it, ends, however that one ended (Linux); it stays on its cores, CORES being `0,1/2,3` with one part per
local rank, or `-`; and it ignores SIGHUP if PARENT has blocked it. Run as a file, with the standard library alone,
so that it costs a few milliseconds.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def start_through_child(number: str, local_rank: str = "0", cores: str = "-") -> tuple[str, ...]:
    """The words that go in front of a program which this process starts."""
    return (sys.executable, "-I", "-S", __file__, number, str(os.getpid()), local_rank, cores, "--")


def _end_with_parent(number: int, parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has gone before
        os.kill(os.getpid(), number)


def _ignore_what_is_blocked() -> None:
    """A parent with a handler for SIGHUP cannot hand down that it is ignored: that becomes the default again."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGHUP}
    for number in held:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def _become(program: list[str]) -> None:
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python; a program that finds them so keeps them so
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"zeroshard: cannot start {program[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)  # as shells have it


if __name__ == "__main__":
    number, parent, local_rank, cores = signal.Signals[sys.argv[1]], *map(int, sys.argv[2:4]), sys.argv[4]
    if sys.platform == "linux":
        _end_with_parent(number, parent)
        if cores != "-":
            os.sched_setaffinity(0, {int(core) for core in cores.split("/")[local_rank].split(",")})
    _ignore_what_is_blocked()
    _become(sys.argv[6:])
