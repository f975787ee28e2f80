"""What is known of ranks that failed, and which of them is the cause."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

__all__ = [
    "RECORD_PREFIX",
    "Failure",
    "describe_failure",
    "exit_status",
    "last_lines",
    "read_record",
    "write_record",
]

RECORD_PREFIX = "::zeroshard-failed "
_LAST_LINES = 20


@dataclass(frozen=True)
class Failure:
    """How one rank ended; `exitcode` is minus the signal, as in `subprocess`."""

    pid: int
    exitcode: int
    timestamp: float
    host: str = ""
    log: tuple[str, ...] = ()  # its last lines on stderr


def _root_cause(failures: Mapping[int, Failure]) -> int:
    """The rank that failed by itself.

    Ranks that torchrun stopped show SIGTERM and come last. A rank that was killed comes first: its peers fail
    in the same moment because their connection broke, with exceptions of their own.
    """

    def order(rank: int) -> tuple[bool, bool, float, int]:
        failure = failures[rank]
        return failure.exitcode == -signal.SIGTERM, failure.exitcode > 0, failure.timestamp, rank

    return min(failures, key=order)


def exit_status(failures: Mapping[int, Failure]) -> int:
    """The root cause's exit code; 128 + signal if it was killed, as shells have it."""
    code = failures[_root_cause(failures)].exitcode
    return code if code > 0 else 128 - code


def last_lines(failures: Mapping[int, Failure]) -> str:
    """What the root cause said last, each line marked; "" if nothing."""
    root = _root_cause(failures)
    lines = failures[root].log[-_LAST_LINES:]
    return "\n".join([f"last lines of rank {root}:", *(f"  | {line}" for line in lines)]) if lines else ""


def describe_failure(failures: Mapping[int, Failure], ranks: int | None) -> str:
    """One paragraph: who failed first and how, who failed with it, and what became of the rest of `ranks`.

    `rank 1 (pid 4711) on node2 was killed by SIGKILL; the others were stopped`
    """
    root = _root_cause(failures)
    failure = failures[root]
    place = f" on {failure.host}" if failure.host else ""
    message = f"rank {root} (pid {failure.pid}){place} {_ending(failure.exitcode)}"
    also = [
        f"rank {rank} {_ending(other.exitcode)}"
        for rank, other in sorted(failures.items())
        if rank != root and other.exitcode != -signal.SIGTERM
    ]
    if also:
        message += f" ({', '.join(also)} in the same moment)"
    if failure.exitcode == -signal.SIGKILL:
        message += ", which is what the system does when memory runs out"
    if failure.exitcode == -signal.SIGABRT:
        message += ", which gloo does when ranks launch collectives of different sizes: run it again with "
        message += "ZEROSHARD_DEBUG=collectives to see which"
    return message + ("; the others were stopped" if ranks is None or len(also) + 1 < ranks else "")


def _ending(exitcode: int) -> str:
    if exitcode > 0:
        return f"ended with exit code {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def write_record(failures: Mapping[int, Failure]) -> str:
    """One line for the launcher that reads this host's stderr. Of what ranks said, that of the cause is in it."""
    root = _root_cause(failures)
    told = {rank: f if rank == root else replace(f, log=()) for rank, f in failures.items()}
    return RECORD_PREFIX + json.dumps({rank: asdict(failure) for rank, failure in told.items()})


def read_record(text: str, host: str) -> dict[int, Failure]:
    """The failures of what `write_record` put behind the prefix, as those of `host`."""
    read = json.loads(text)
    return {int(rank): Failure(**(f | {"host": host, "log": tuple(f["log"])})) for rank, f in read.items()}
