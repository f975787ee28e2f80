"""Between torchrun's agent and a rank's program: `python rank.py LOCAL_RANK CORES -- program...`.

Becomes the program, in the same process, after two things that are inherited: a rank dies with the agent that
started it (Linux), however that one ended; and it stays on its cores, CORES being `0,1/2,3` with one part per rank,
or `-`. Run as a file, with the standard library alone, so that it costs a few milliseconds.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has gone in between
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    local_rank, cores = int(sys.argv[1]), sys.argv[2]
    program = sys.argv[4:]
    if sys.platform == "linux":
        _die_with_parent()
        if cores != "-":
            os.sched_setaffinity(0, {int(core) for core in cores.split("/")[local_rank].split(",")})
    os.execvp(program[0], program)
