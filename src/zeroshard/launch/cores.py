"""Which cores the ranks of one host run on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zeroshard.errors import LaunchError

__all__ = ["cores_here", "cut_cores", "parse_core_list"]


def cores_here() -> tuple[int, ...]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def parse_core_list(text: str) -> tuple[int, ...]:
    """`"0-2,8"` as `(0, 1, 2, 8)`: ascending, without overlap."""
    cores: list[int] = []
    for span in text.split(","):
        low, dash, high = (word.strip() for word in span.partition("-"))
        if not (low.isdecimal() and (high.isdecimal() if dash else True)):
            raise LaunchError(
                f"--bind_core_list {text!r}: {span!r} is neither a core nor a range such as 0-3"
            )
        first, last = int(low), int(high or low)
        if first > last or (cores and first <= cores[-1]):
            raise LaunchError(
                f"--bind_core_list {text!r}: {span!r} does not ascend; cores are listed once, in order"
            )
        cores += range(first, last + 1)
    return tuple(cores)


def cut_cores(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """The cores of each rank: parts of equal size, neighbours together; what is left over stays free."""
    each = len(cores) // ranks
    if each == 0:
        raise LaunchError(f"--bind_cores_to_rank: {ranks} ranks, and only {len(cores)} cores to bind them to")
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]
