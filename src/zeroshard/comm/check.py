"""ZEROSHARD_DEBUG=collectives: ranks compare each collective before it starts, so nothing is mixed up.

A rank that launches a collective announces it in the job's store and goes on. The collective itself starts in
the next wait, of any group, that finds the announcements of all ranks of its group to be alike. So sizes that
differ never reach a backend that aborts on them, and data of a wrong collective are never used. On devices with
streams it starts at once, and the comparison still comes before the wait.

This waits for nothing that the wait itself would not wait for: it changes how fast a run is, not whether it ends.
Proof that no start is held back for ever: of the ranks that stand in a started collective, take the one that
entered last. All that the others stand in were agreed on before it entered, so it has started them.

While a rank waits it looks every half second at where the others are:

    one that has ended, failed, or gives no sign of life    an error at once
    ranks that wait for each other                          an error, once each has said again that it does
    one that computes                                       may be slow: a warning; an error at the time-out
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.divergence import NO_GRADIENTS, Launch, Position, doomed
from zeroshard.comm.record import GroupRecord
from zeroshard.comm.seam import Done, Work
from zeroshard.comm.stacks import place_of, site_of
from zeroshard.comm.watch import Watch
from zeroshard.errors import CommError, DivergedError, RankLostError

__all__ = ["Checker", "checker_for"]

log = logging.getLogger("zeroshard")

_KEPT = 1024
"""Announcements of a group that stay in the store: more than are ever launched and not waited for."""
_LOOK = 0.5  # seconds between two looks at where the others are
_SILENCE = 15.0  # seconds in which a rank's watchdog would have written something new


def checker_for(watch: Watch, seconds: float) -> Checker:
    """The checker of this process. CommError where ranks cannot be compared."""
    if watch.store is None:
        raise CommError(
            "ZEROSHARD_DEBUG=collectives compares ranks through the store of the process group, and this one has "
            "none; make it with init_process_group of a backend that has (gloo, nccl)."
        )
    if watch.checker is None:
        watch.checker = Checker(watch)
    checker: Checker = watch.checker
    checker.seconds = seconds
    return checker


class Checker:
    """All announcements of this process that have not started yet."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._store = watch, watch.store
        self.seconds = 0.0
        """A rank that keeps the others waiting for longer is reported."""
        self._lock = threading.RLock()
        self._pending: list[_Announced] = []

    def announce(
        self,
        record: GroupRecord,
        verb: str,
        label: str,
        tensor: Tensor,
        start: Callable[[], Any],
        *,
        blocks: bool = False,
    ) -> tuple[_Announced, int]:
        """A collective is launched: `start` will run it. `blocks`: it returns when it is done, and not before."""
        entry, _ = place_of(threading.get_ident())
        if entry == "forward" and not torch.is_grad_enabled():
            entry = NO_GRADIENTS
        number = record.note(verb, label or f"{site_of()}()", tensor.numel(), tensor.dtype, entry)
        launch = record.at(number)
        assert launch is not None
        self._store.set(_key(record, number, self._watch.rank), json.dumps(list(vars(launch).values())))
        if number >= _KEPT:
            self._store.delete_key(_key(record, number - _KEPT, self._watch.rank))
        missing = [rank for rank in record.ranks if rank != self._watch.rank]
        item = _Announced(self, record, launch, start, blocks, missing)
        if tensor.device.type != "cpu" and not blocks:
            item.work = start()
        with self._lock:
            self._pending.append(item)
        return item, number

    def until_agreed(self, item: _Announced) -> None:
        """Return when all ranks have announced the same as `item`, and it has started."""
        began = looked = time.monotonic()
        pause = 0.0002
        looks = _Looks(self.seconds)
        while True:
            if item.is_lost:
                raise DivergedError(f"{item.launch} was given up when an earlier collective failed.")
            try:
                self._go_on()
                if item.agreed:
                    return
                now = time.monotonic()
                if now - looked > _LOOK:
                    looked = now
                    self._judge(item, now - began, looks)
            except BaseException:
                self._give_up()
                raise
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _give_up(self) -> None:
        """What has been announced will not be agreed on; who waits for it later must not wait for ever."""
        with self._lock:
            for item in self._pending:
                item.is_lost = True
            self._pending.clear()

    def done(self, item: _Announced) -> None:
        """A collective that blocks is over."""
        with self._lock:
            self._pending.remove(item)

    def _go_on(self) -> None:
        """Start what all have announced, group by group in order."""
        with self._lock:
            held = set()
            for item in list(self._pending):
                if item.record.name in held:
                    continue
                if not item.agreed:
                    self._compare(item)
                if not item.agreed or item.blocks:
                    held.add(item.record.name)
                    continue
                if item.work is None:
                    item.work = item.start()
                self._pending.remove(item)

    def _compare(self, item: _Announced) -> None:
        for rank in list(item.missing):
            key = _key(item.record, item.launch.number, rank)
            if not self._store.check([key]):
                continue
            theirs = Launch(*json.loads(self._store.get(key)))
            if not theirs.matches(item.launch):
                raise DivergedError(
                    f"rank {self._watch.rank} launched {item.launch}, and rank {rank} {theirs} instead."
                )
            item.missing.remove(rank)
        item.agreed = not item.missing

    def _judge(self, item: _Announced, waited: float, looks: _Looks) -> None:
        """Raise when the ranks that are missing will never come; warn when they are late."""
        positions = self._watch.positions()
        what = f"rank {self._watch.rank} waits for {item.launch}"
        over = [rank for rank in item.missing if rank in positions and positions[rank].is_over]
        if over:
            raise DivergedError(f"{what}, which ranks {over} will not launch.")
        silent = looks.silent(item.missing, {r: p.idle for r, p in positions.items()})
        if silent:
            self._watch.gone.update(silent)
            raise RankLostError(f"{what}, and ranks {silent} gave no sign of life for {_SILENCE:g} s.")
        stuck = doomed(positions)
        if self._watch.rank in stuck and looks.prove({r: positions[r] for r in stuck}):
            raise DivergedError(f"{what}, and ranks {sorted(stuck)} wait for each other.")
        if waited > item.record.timeout:
            raise CommError(
                f"{what}: ranks {item.missing} did not launch it within {item.record.timeout:g} s."
            )
        if waited > looks.next_warning:
            looks.next_warning *= 2
            for rank in item.missing:
                where = positions[rank].where if rank in positions else "a place it has not told"
                log.warning(
                    "%s for %.0f s: rank %d is slow, at %s; after %g s this is an error",
                    what,
                    waited,
                    rank,
                    where,
                    item.record.timeout,
                )


class _Looks:
    """What earlier looks of one wait saw."""

    def __init__(self, seconds: float) -> None:
        self.next_warning = seconds
        self._stuck: dict[int, tuple[int, float]] = {}
        self._idle: dict[int, tuple[float, float]] = {}

    def prove(self, stuck: dict[int, Position]) -> bool:
        """These ranks stood where they are all at one time, which was the look that found them first: each has
        written since that it is still there."""
        now = {rank: (position.progress, position.idle) for rank, position in stuck.items()}
        before = self._stuck
        if before.keys() != now.keys() or any(before[r][0] != now[r][0] for r in now):
            self._stuck = now
            return False
        return bool(now) and all(now[r][1] > before[r][1] for r in now)

    def silent(self, ranks: list[int], idle: dict[int, float]) -> list[int]:
        """Ranks whose watchdog has written nothing new for long."""
        now = time.monotonic()
        for rank in ranks:
            seen, _ = self._idle.get(rank, (None, now))
            if seen != idle.get(rank, -1.0):
                self._idle[rank] = idle.get(rank, -1.0), now
        return [rank for rank in ranks if now - self._idle[rank][1] > _SILENCE]


@dataclass(eq=False)
class _Announced:
    """A collective that was launched and starts when all have launched it."""

    checker: Checker
    record: GroupRecord
    launch: Launch
    start: Callable[[], Any]
    blocks: bool
    missing: list[int]
    agreed: bool = False
    is_lost: bool = False
    work: Work | None = field(default=None)

    def wait(self) -> None:
        self.checker.until_agreed(self)
        if self.blocks:
            self.start()
            self.checker.done(self)
            self.work = Done()
        assert self.work is not None
        self.work.wait()


def _key(record: GroupRecord, number: int, rank: int) -> str:
    return f"launch/{record.name}/{number}/{rank}"
