"""The watchdog: tells where this rank is when nothing moves, and reads where the others are when one is stuck.

One `Watch` per process serves all groups that are open. Its thread wakes up now and then and looks at counters.
A rank that has neither launched nor finished a collective for `patience` seconds writes its position into the
job's rendezvous store, whether it waits in a collective or computes; nothing is written while the run moves. So
whoever gets stuck finds the positions of the others there, and nobody has to be asked.

    a collective fails (time-out, lost peer)    its error carries the report of all positions
    a process ends                              it says so on its way out
    a wait outlasts even its time-out           the seam is stuck in code that cannot be interrupted: the thread
                                                prints the report and ends the process with status EXIT_STATUS
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from zeroshard.comm.divergence import Position, report
from zeroshard.comm.record import GroupRecord
from zeroshard.comm.stacks import place_of
from zeroshard.errors import ConfigError

__all__ = ["EXIT_STATUS", "Watch", "debugs_collectives", "process_watch"]

log = logging.getLogger("zeroshard")

EXIT_STATUS = 70
"""Of a process that the watchdog ends. EX_SOFTWARE of sysexits.h."""
_MODES = ("collectives",)
_STORE_TIMEOUT = 5.0  # seconds for one answer of the store
_AFTER_LOSS = 2.5  # seconds that the others have to come to the same error


def debugs_collectives() -> float | None:
    """What ZEROSHARD_DEBUG asks for: seconds after which a slow rank is reported, None when it is not set.

    Raises ConfigError for a value that is not known.
    """
    words = [word for word in os.environ.get("ZEROSHARD_DEBUG", "").replace(",", " ").split() if word != "0"]
    unknown = [word for word in words if word not in _MODES]
    if unknown:
        raise ConfigError(
            f"ZEROSHARD_DEBUG={unknown[0]!r} in the environment is not known; known: {', '.join(_MODES)}"
        )
    text = os.environ.get("ZEROSHARD_DEBUG_TIMEOUT", "5")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"ZEROSHARD_DEBUG_TIMEOUT={text!r} must be a number of seconds, more than 0")
    return seconds if words else None


class Watch:
    """What this process tells about itself, and knows of the others."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        """`store` is any `torch.distributed` store; None leaves only what this rank itself can say."""
        self.rank, self.world, self.store = rank, world, store
        self.checker: Any = None
        """Of ZEROSHARD_DEBUG=collectives (`check.Checker`). Positions are then written within about a second."""
        self.gone: set[int] = set()
        """Ranks known to be dead: what they wrote last does not count."""
        self._open: weakref.WeakValueDictionary[str, GroupRecord] = weakref.WeakValueDictionary()
        """By name, oldest first."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = False
        """The store has a position of this rank."""
        self._progress = -1
        self._since = time.monotonic()
        self._failed = False

    def add(self, record: GroupRecord) -> None:
        """Watch a group from here on, until `remove`, or until it is dropped."""
        with self._lock:
            if self._failed:  # nothing more can come of what was open then
                self._open.clear()
                self._failed = False
            self._open[record.name] = record
            self._withdraw()
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="zeroshard-watch", daemon=True
                )
                self._thread.start()

    def remove(self, record: GroupRecord) -> None:
        with self._lock:
            self._open.pop(record.name, None)
            if self._open:
                return
        self.stop()
        self._withdraw()

    def stop(self) -> None:
        """End the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STORE_TIMEOUT + 1)

    def _records(self) -> list[GroupRecord]:
        return list(self._open.values())

    # ---- this rank ----------------------------------------------------------------------------------

    def position(self) -> Position:
        """Where this rank is, looked up now."""
        records = self._records()
        waiting = next(((record, held) for record in records if (held := record.waiting) is not None), None)
        entry, where = place_of(None if waiting is None else waiting[1][1])
        frozen, training = next(
            (record.facts() for record in records if record.facts is not None), ((), True)
        )
        return Position(
            rank=self.rank,
            waiting=None if waiting is None else (waiting[0].name, waiting[1][0]),
            entry="" if waiting is None else entry,
            where=where,
            idle=time.monotonic() - self._since,
            progress=_progress(records),
            failed=self._failed,
            frozen=frozen,
            training=training,
            groups={record.name: record.view() for record in records},
        )

    def tell(self, position: Position) -> None:
        """Write a position of this rank where others find it."""
        if self.store is not None:
            with contextlib.suppress(Exception):  # the store may have ended with the rank that held it
                self.store.set(_key(self.rank), position.encode())
                self._told = True

    def _withdraw(self) -> None:
        if self._told and not self._failed:
            self._told = False
            with contextlib.suppress(Exception):
                self.store.set(_key(self.rank), "")

    def say_end(self) -> None:
        """The process ends: say how."""
        if self._failed or not self._open:
            return
        error = getattr(sys, "last_value", None)
        how = "its script has finished" if error is None else f"ended with {type(error).__name__}: {error}"
        self.tell(Position(rank=self.rank, ended=how[:300], progress=self._progress))

    # ---- the others ---------------------------------------------------------------------------------

    def positions(self) -> dict[int, Position]:
        """What ranks have written, this one's own as it is now."""
        found = {self.rank: self.position()}
        if self.store is None:
            return found
        for rank in range(self.world):
            if rank != self.rank and rank not in self.gone:
                text = self._read(_key(rank))
                if text:
                    found[rank] = Position.decode(text)
        return found

    def _read(self, key: str) -> str:
        with contextlib.suppress(Exception):
            if self.store.check([key]):
                return str(self.store.get(key).decode())
        return ""

    def explain(self, record: GroupRecord, *, is_late: bool) -> str:
        """The report for an error of `record`'s group, once the others have had the time to write.

        `is_late`: nobody moves any more; else the others may still be on their way to the same error.
        """
        self._failed = True
        self.tell(self.position())
        late = self._patience(record.timeout) + 2 * self._period(record.timeout)
        give_up = time.monotonic() + (late if is_late else _AFTER_LOSS)
        # Who waits for each other may do so by way of other groups; a lost rank is one of this group.
        wanted = set(range(self.world)) if is_late else set(record.ranks)
        first = found = self.positions()
        while True:
            # What a rank wrote may be old, until it has written again; the last word of one that is over is not.
            known = {r: p for r, p in found.items() if p.is_over or r not in first or p.idle != first[r].idle}
            known[self.rank] = found[self.rank]
            if wanted <= known.keys() or time.monotonic() > give_up:
                return report(self.rank, known, wanted)
            time.sleep(0.05)
            found = self.positions()

    # ---- the thread ---------------------------------------------------------------------------------

    def _run(self, stop: threading.Event) -> None:
        while True:
            records = self._records()
            if not records:  # dropped without close
                self.tell(Position(rank=self.rank, ended="has dropped its engine without close()"))
                return
            limit = min(record.timeout for record in records)
            del records
            if stop.wait(self._period(limit)):
                return
            try:
                self._look(limit)
            except Exception:  # told once, and the run goes on: the watchdog must not be what ends it
                log.exception("the watchdog of collectives stops")
                return

    def _look(self, limit: float) -> None:
        progress, now = _progress(self._records()), time.monotonic()
        if progress != self._progress:
            self._progress, self._since = progress, now
            self._withdraw()
            return
        idle = now - self._since
        if idle < self._patience(limit) or self._failed:
            return
        position = self.position()
        self.tell(position)
        if position.waiting is not None and idle > limit + self._backstop(limit):
            self._end_process(position)

    def _end_process(self, position: Position) -> None:
        """The main thread is beyond reach of an exception."""
        text = report(self.rank, self.positions(), range(self.world))
        print(
            f"zeroshard: rank {self.rank} has waited {position.idle:.0f} s for {position.launch}, past the "
            f"time-out of its group, and ends with status {EXIT_STATUS}.\n{text}",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_STATUS)

    def _period(self, limit: float) -> float:
        """Seconds between two looks."""
        return min(max(limit / 40, 0.05), 2.0 if self.checker is None else 0.25)

    def _patience(self, limit: float) -> float:
        """Seconds without a collective after which a rank writes where it is."""
        return min(limit / 4, 8.0 if self.checker is None else 1.0)

    def _backstop(self, limit: float) -> float:
        """Seconds past the time-out in which the seam itself should have raised."""
        return min(max(limit / 4, 3.0), 30.0) + self._patience(limit)


def _key(rank: int) -> str:
    return f"position/{rank}"


def _progress(records: Iterable[GroupRecord]) -> int:
    return sum(record.launched + record.waits for record in records)


# ---- one per process ------------------------------------------------------------------------------------

_current: Watch | None = None
_of_group: weakref.ref[Any] | None = None


def process_watch() -> Watch:
    """The watch of this process, for the default process group that exists now."""
    global _current, _of_group
    world = dist.group.WORLD
    if _current is None or _of_group is None or _of_group() is not world:
        if _current is not None:
            _current.stop()
        _current = Watch(_own_store(), dist.get_rank(), dist.get_world_size())
        _of_group = weakref.ref(world)
        atexit.register(_at_exit, weakref.ref(_current), os.getpid())
    return _current


def _own_store() -> Any:
    """A connection of our own to the job's store: the process group's may be busy for long, and goes with it."""
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        store.set_timeout(datetime.timedelta(seconds=_STORE_TIMEOUT))
        return dist.distributed_c10d.PrefixStore("zeroshard", store)
    except Exception as error:
        log.debug("no store to tell positions in: %s", error)
        return None


def _at_exit(watch: weakref.ref[Watch], pid: int) -> None:
    ending = watch()
    if ending is not None and os.getpid() == pid:  # a forked child is not the rank
        ending.stop()
        ending.say_end()
