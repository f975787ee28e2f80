"""Between a launcher and a program: `python child.py SIGNAL LOCAL_RANK CORES -- program...`.

Becomes the program, in the same process, after two things that are inherited: it gets SIGNAL when its parent ends,
however that one ended (Linux); and it stays on its cores, CORES being `0,1/2,3` with one part per local rank, or
`-`. Run as a file, with the standard library alone, so that it costs a few milliseconds.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def _end_with_parent(number: int) -> None:
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has gone in between
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    number, local_rank, cores = signal.Signals[sys.argv[1]], int(sys.argv[2]), sys.argv[3]
    program = sys.argv[5:]
    if sys.platform == "linux":
        _end_with_parent(number)
        if cores != "-":
            os.sched_setaffinity(0, {int(core) for core in cores.split("/")[local_rank].split(",")})
    os.execvp(program[0], program)
