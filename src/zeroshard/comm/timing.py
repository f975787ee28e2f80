"""The seam with a stopwatch: what `comms_logger` of the config puts around an engine's collectives.

Two times are taken of each collective:

    latency    from its launch until its `wait()` has returned. Compute that overlaps it is in there too, so a
               bandwidth that is taken from it is a lower bound.
    blocked    the part of it in which this rank did nothing else: inside the launch, and inside `wait()`. It is
               what the collective costs the step, and what tells who waited for whom.

On the CPU both come from the wall clock. On a device they come from events on the stream that launches and the one
that waits: blocked is the time between the events before and after `wait()` orders the stream, and nothing is
synchronised until somebody asks for the figures. The path for devices has been run with stand-ins for events only.

Collectives are not made to wait at their launch, as DeepSpeed does: gathers and reductions have no common order, so
ranks that each waited in the one they launched first could wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeroshard.comm.seam import Collectives, Work
from zeroshard.comm.stacks import site_of
from zeroshard.comm.wrapper import Wrapper

if TYPE_CHECKING:
    from zeroshard.comm.log import CommsLog, Series

__all__ = ["LoggedGroup", "TimedCollectives", "seconds_between"]

Mark = Any
"""A moment: `time.perf_counter()`, or an event of a device."""


@dataclass(eq=False)
class LoggedGroup:
    """One group of ranks of an engine, as its log knows it; it outlives the engine."""

    name: str
    """What it is in the engine: gather, reduce, replicate or secondary."""
    size: int
    rank: int
    ranks: tuple[int, ...]
    """Global ranks."""
    collectives: Collectives | None
    """To compare times through; None once the group is closed."""


class TimedCollectives(Wrapper):
    """`inner`, written into `log`; `name` is that of the group in the engine (gather, reduce, ...)."""

    def __init__(self, inner: Collectives, log: CommsLog, name: str) -> None:
        super().__init__(inner)
        ranks = tuple(range(inner.size)) if self.record is None else self.record.ranks
        self.log, self.group = log, LoggedGroup(name, inner.size, inner.rank, ranks, inner)
        log.groups.append(self.group)

    def close(self) -> None:
        self.group.collectives = None
        super().close()

    def launch(self, verb: str, full: Tensor, shard: Tensor | None, start: Callable[[], Work]) -> Work:
        series = self._series(verb, full)
        if series is None:
            return start()
        began = mark(full.device)
        work = start()
        return _Timed(series, work, full.device, began, mark(full.device))

    def finish(self, verb: str, tensor: Tensor, run: Callable[[], Any]) -> None:
        series = self._series(verb, tensor)
        if series is None:
            run()
            return
        began = mark(tensor.device)
        run()
        ended = mark(tensor.device)
        series.timed(series.launched(), began, began, began, ended)

    def _series(self, verb: str, tensor: Tensor) -> Series | None:
        if not self.log.wants(verb):
            return None
        about = ""
        if self.log.settings.debug:
            about = f" in {site_of()}" + (f" for {self.label}" if self.label else "")
        return self.log.series(self.group, verb, about, tensor.numel() * tensor.element_size())


class _Timed:
    """A launched collective; its first wait ends the measurement."""

    __slots__ = ("_began", "_device", "_launched", "_number", "_series", "_work")

    def __init__(self, series: Series, work: Work, device: torch.device, began: Mark, launched: Mark) -> None:
        self._series: Series | None = series
        self._work, self._device, self._began, self._launched = work, device, began, launched
        self._number = series.launched()

    def wait(self) -> None:
        series, self._series = self._series, None
        if series is None:
            self._work.wait()
            return
        waits = mark(self._device)
        self._work.wait()
        series.timed(self._number, self._began, self._launched, waits, mark(self._device))


def mark(device: torch.device) -> Mark:
    """Now, as the work of `device` sees it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(first: Mark, second: Mark) -> float | None:
    """Between two marks; None while the device has not come to the second one."""
    if isinstance(first, float):
        return float(second - first)
    if not second.query():
        return None
    return float(first.elapsed_time(second)) / 1e3
