"""What backward is done with, read off the order of the forwards.

Autograd runs what is ready in the opposite order of its making. When it comes to the outputs of a forward, nothing
is left to do of forwards that began after that one had ended: on every rank alike, whatever gradients a rank's data
brought. Here that is kept in integers: moments count the beginnings and ends of forwards.

    forward   bucket 0 from moment 1 to 2, bucket 1 from 3 to 4, bucket 0 again from 5 to 6
    backward  comes to what ended at 6, then at 4: the use of 0 that began at 5 is over, though 0 is not finished;
              then at 2: 1 began after that, at 3, so it is over and finished. 0 is with the end of the task.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

__all__ = ["NEVER", "Unwinding"]

NEVER = sys.maxsize
"""The end of a forward of which no order is known: nothing began after it."""


class Unwinding:
    """The forwards since the latest backward, and the backwards (autograd's graph tasks) that run."""

    def __init__(self) -> None:
        self._moment = 0
        self._firsts: dict[int, int] = {}
        """Per bucket, when its first forward since the latest backward began: increasing."""
        self._ends: dict[int, int] = {}
        """Per bucket, when its latest forward outside of backward ended."""
        self._tasks: dict[int, dict[int, int]] = {}
        """By task, outermost first: its open buckets, and when the first of their forwards that it has come to
        began."""

    def tick(self) -> int:
        """A new moment."""
        self._moment += 1
        return self._moment

    def begin_use(self, bucket: int) -> None:
        """A forward outside of backward, that autograd records, begins to use a bucket."""
        self._firsts.setdefault(bucket, self._moment)

    def end_use(self, bucket: int) -> None:
        """A forward outside of backward ended."""
        self._ends[bucket] = self._moment

    def repeated(self, buckets: Iterable[int]) -> int:
        """The latest moment at which a forward ended that a recomputed one may repeat."""
        return max(self._ends.get(bucket, NEVER) for bucket in buckets)

    # ---- backward -----------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return bool(self._tasks)

    def knows(self, task: int) -> bool:
        return task in self._tasks

    def enter(self, task: int) -> None:
        """A backward starts, inside of those that run."""
        self._tasks[task] = {}

    def leave(self, task: int) -> None:
        """It is over."""
        del self._tasks[task]
        if not self._tasks:
            self._firsts.clear()

    def abandon(self) -> None:
        """What runs was left by an exception."""
        self._tasks.clear()

    def is_open(self, task: int, bucket: int) -> bool:
        return bucket in self._tasks.get(task, ())

    def open(self, task: int, bucket: int, began: int) -> bool:
        """The task comes to a forward that began at that moment; whether the bucket was not open in it."""
        opened = self._tasks[task]
        is_new = bucket not in opened
        opened[bucket] = min(opened.get(bucket, began), began)
        return is_new

    def over(self, task: int, ended: int) -> list[int]:
        """Close the task's buckets of which it has come to nothing that began before that moment."""
        opened = self._tasks[task]
        closed = [bucket for bucket, began in opened.items() if began > ended]
        for bucket in closed:
            del opened[bucket]
        return closed

    def finished(self, ended: int) -> Iterator[int]:
        """Buckets that no forward used before that moment, the latest first: all their gradients are there."""
        while self._firsts and next(reversed(self._firsts.values())) > ended:
            yield self._firsts.popitem()[0]
