"""The log of collectives: counts, sizes and times by operation and message size.

One log per process, switched on by `comms_logger.enabled` in the config of an engine, or by `configure_log` before
engines are made. It is off by default, and then there is nothing around the collectives. `log_table` prints it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from zeroshard.comm.bandwidth import bandwidth
from zeroshard.comm.timing import LoggedGroup, seconds_between
from zeroshard.config import parse
from zeroshard.config.sections import LOGGED_AS, CommsLogger
from zeroshard.wording import size_in_words

__all__ = [
    "LOG",
    "REMEMBERED",
    "UNITS",
    "CommsLog",
    "Series",
    "configure_log",
    "has_log",
    "is_first_rank",
    "log_for",
    "logged_operations",
    "reset_log",
]

UNITS = ("KB", "MB", "GB", "TB")
"""As in DeepSpeed's table."""
REMEMBERED = 10_000
"""Collectives of a row whose own times are kept, for the straggler column."""
_PENDING = 1_000
"""Measurements of a device that are yet to be read; beyond it they are waited for."""


class Series:
    """Collectives of one operation and size in one group: a row of the table."""

    def __init__(self, log: CommsLog, group: LoggedGroup, verb: str, about: str, nbytes: int) -> None:
        self.log, self.group, self.verb, self.nbytes = log, group, verb, nbytes
        self.name = verb + about
        self.count = 0
        """Launched."""
        self.finished = 0
        self.latency = self.blocked = 0.0
        """Seconds, of those that have finished."""
        self.recent = array("d")
        """Blocked seconds of the latest ones; number n is at n % REMEMBERED, and NaN until it has finished."""

    def launched(self) -> int:
        """A collective is launched; its number."""
        number = self.count
        if number < REMEMBERED:
            self.recent.append(math.nan)
        else:
            self.recent[number % REMEMBERED] = math.nan
        self.count = number + 1
        return number

    def timed(self, number: int, began: Any, launched: Any, waits: Any, ended: Any) -> None:
        """It has been waited for: the four moments of it. On a device they are read later."""
        self.log.pend(self, number, (began, launched, waits, ended))

    def read(self, number: int, marks: Sequence[Any]) -> bool:
        """Take the times of a collective, if the device has come so far."""
        began, launched, waits, ended = marks
        blocked = seconds_between(waits, ended)
        if blocked is None:
            return False
        blocked += seconds_between(began, launched) or 0.0
        latency = seconds_between(began, ended) or 0.0
        self.finished += 1
        self.latency += latency
        self.blocked += blocked
        if self.count - number <= REMEMBERED:
            self.recent[number % REMEMBERED] = blocked
        if self.log.settings.verbose and is_first_rank():
            algorithm, bus = bandwidth(self.verb, self.nbytes, latency, self.group.size)
            size = size_in_words(self.nbytes, UNITS)
            print(
                f"comm {self.name} | {size} | {self.group.size} ranks | {1e3 * latency:.3f} ms, "
                f"blocked {1e3 * blocked:.3f} ms | algbw {algorithm / 1e9:.3f} GB/s | busbw {bus / 1e9:.3f} GB/s",
                flush=True,
            )
        return True


class CommsLog:
    """What has been logged in this process."""

    def __init__(self) -> None:
        self.settings = CommsLogger()
        self.enabled = False
        """Engines that are made from now on are logged, whatever their config says."""
        self.groups: list[LoggedGroup] = []
        """In the order of their opening, which is the same on all their ranks."""
        self._series: dict[tuple[int, str, int], Series] = {}
        self._wanted: frozenset[str | None] = frozenset()
        self._pending: list[tuple[Series, int, Sequence[Any]]] = []

    def configure(self, settings: CommsLogger) -> None:
        self.settings = settings
        self._wanted = frozenset(LOGGED_AS.get(name, name) for name in settings.prof_ops)

    def wants(self, verb: str) -> bool:
        return self.settings.prof_all or verb in self._wanted

    def series(self, group: LoggedGroup, verb: str, about: str, nbytes: int) -> Series:
        key = id(group), verb + about, nbytes  # groups live as long as the log
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = Series(self, group, verb, about, nbytes)
        return found

    def pend(self, series: Series, number: int, marks: Sequence[Any]) -> None:
        if not self._pending and series.read(number, marks):
            return
        self._pending.append((series, number, marks))
        self._read()
        if len(self._pending) > _PENDING:
            self.settle()

    def _read(self) -> None:
        """Read what the devices have come to, in order."""
        done = 0
        for series, number, marks in self._pending:
            if not series.read(number, marks):
                break
            done += 1
        del self._pending[:done]

    def settle(self) -> None:
        """Wait until everything that was waited for is measured."""
        for _, _, marks in self._pending:
            if not isinstance(marks[-1], float):
                marks[-1].synchronize()
        self._read()

    def rows(self) -> list[Series]:
        """By operation and size, and the groups in their order."""
        place = {id(group): index for index, group in enumerate(self.groups)}
        return sorted(self._series.values(), key=lambda row: (row.name, row.nbytes, place[id(row.group)]))

    def reset(self) -> None:
        """Forget what was logged; go on logging."""
        self.settle()
        self._series.clear()
        self._pending.clear()
        self.groups = [group for group in self.groups if group.collectives is not None]


LOG = CommsLog()


def configure_log(
    *,
    enabled: bool = True,
    prof_all: bool = True,
    prof_ops: Sequence[str] = (),
    verbose: bool = False,
    debug: bool = False,
) -> None:
    """Log the collectives of engines that are made from now on; `enabled=False`: of those no longer.

    The fields are those of `comms_logger`, which does the same for one engine. There is one log, and the settings
    that came last are those of all engines that write into it. Raises ConfigError as a config with them does.
    """
    given = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
    }
    LOG.configure(parse({"comms_logger": given}).comms_logger)
    LOG.enabled = enabled


def log_for(section: CommsLogger) -> CommsLog | None:
    """The log that an engine with this config writes into; None when nobody asked for one."""
    if section.enabled:
        LOG.configure(section)
        return LOG
    return LOG if LOG.enabled else None


def reset_log() -> None:
    """Forget what was logged in this process, and go on logging."""
    LOG.reset()


def has_log() -> bool:
    """Whether anything was logged."""
    return bool(LOG.rows())


def logged_operations() -> dict[str, int]:
    """Collectives logged so far, by operation."""
    counts: dict[str, int] = {}
    for row in LOG.rows():
        counts[row.name] = counts.get(row.name, 0) + row.count
    return counts


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
