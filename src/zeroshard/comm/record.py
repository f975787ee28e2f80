"""What one process remembers of the collectives of one group: the flight record.

Written on the way of every collective, so it is a counter and a ring of tuples; texts are made when somebody
asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zeroshard.comm.divergence import GroupView, Launch

__all__ = ["GroupRecord"]

REMEMBERED = 64
"""Launches per group."""


class GroupRecord:
    """The launches of one group and the wait it is in."""

    def __init__(self, name: str, ranks: Sequence[int], timeout: float) -> None:
        """`name` is the same on all ranks of the group, and no other group ever has it. `ranks` are global."""
        self.name, self.ranks, self.timeout = name, tuple(ranks), timeout
        self.launched = 0
        self.waiting: tuple[int, int] | None = None
        """The collective that a thread waits in, and that thread."""
        self.waits = 0
        """Waits that have ended."""
        self.closed = False
        self.facts: Callable[[], tuple[tuple[str, ...], bool]] | None = None
        """(parameters frozen since `initialize`, whether the model trains), where somebody can tell."""
        self._ring: list[tuple[str, str, int, torch.dtype, str] | None] = [None] * REMEMBERED

    def note(self, verb: str, label: str, numel: int, dtype: torch.dtype, entry: str = "") -> int:
        """A collective is launched; its number."""
        number = self.launched
        self._ring[number % REMEMBERED] = (verb, label, numel, dtype, entry)
        self.launched = number + 1
        return number

    @contextmanager
    def waiting_for(self, number: int) -> Iterator[None]:
        """The calling thread waits for collective `number` inside the block."""
        self.waiting = number, threading.get_ident()
        try:
            yield
        finally:
            self.waiting = None
            self.waits += 1

    def at(self, number: int) -> Launch | None:
        """The launch of that number, unless it is forgotten or yet to come."""
        if not max(0, self.launched - REMEMBERED) <= number < self.launched:
            return None
        entry = self._ring[number % REMEMBERED]
        if entry is None:
            return None
        verb, label, numel, dtype, called = entry
        return Launch(number, verb, label, numel, str(dtype).removeprefix("torch."), called)

    def view(self, length: int = REMEMBERED) -> GroupView:
        """The record as it is told to other ranks, at most `length` launches of it."""
        launched = self.launched
        launches = (self.at(number) for number in range(max(0, launched - length), launched))
        return GroupView(self.ranks, launched, tuple(launch for launch in launches if launch is not None))
