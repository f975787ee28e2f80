"""The seam with a flight record: what is launched is noted, and errors say where all ranks are.

    normal                          a note per collective (about a microsecond); see `watch` for the rest
    ZEROSHARD_DEBUG=collectives     also compares each collective with the other ranks' before it starts: see
                                    `check`

Made by `open_collectives` for every group of several ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor

from zeroshard.comm.arguments import check_flat, check_shard_of
from zeroshard.comm.check import Checker
from zeroshard.comm.record import GroupRecord
from zeroshard.comm.reduction import check_reducible
from zeroshard.comm.seam import Collectives, Work
from zeroshard.comm.shared_memory import SharedMemoryCollectives
from zeroshard.comm.watch import Watch
from zeroshard.comm.wrapper import Wrapper
from zeroshard.errors import CommError, DivergedError, RankLostError

__all__ = ["RecordingCollectives"]

_Result = TypeVar("_Result")


class RecordingCollectives(Wrapper):
    """`inner`, recorded. `labelled` gives the same group for one bucket, under its name."""

    def __init__(
        self, inner: Collectives, record: GroupRecord, watch: Watch, checker: Checker | None = None
    ) -> None:
        super().__init__(inner)
        self.record: GroupRecord = record
        self._watch, self._checker = watch, checker

    def close(self) -> None:
        if self.record.closed:
            return
        self.record.closed = True
        try:
            self.finish("close", torch.empty(0), self.inner.close)
        finally:
            self._watch.remove(self.record)

    def launch(self, verb: str, full: Tensor, shard: Tensor | None, start: Callable[[], Work]) -> Work:
        """Arguments that `start` refuses count as no launch."""
        record = self.record
        if self._checker is not None:
            self._check(verb, full, shard)
            item, number = self._checker.announce(record, verb, self.label, full, lambda: self._run(start))
            return _Recorded(self, item, number)
        try:
            work = self._run(start)
        except (DivergedError, RankLostError) as error:
            with record.waiting_for(record.note(verb, self.label, full.numel(), full.dtype)):
                raise self.explained(error) from error.__cause__
        return _Recorded(self, work, record.note(verb, self.label, full.numel(), full.dtype))

    def finish(self, verb: str, tensor: Tensor, run: Callable[[], Any]) -> None:
        self._check(verb, tensor, None)
        record = self.record
        if self._checker is not None:
            item, number = self._checker.announce(
                record, verb, self.label, tensor, lambda: self._run(run), blocks=True
            )
            _Recorded(self, item, number).wait()
            return
        with record.waiting_for(record.note(verb, self.label, tensor.numel(), tensor.dtype)):
            try:
                self._run(run)
            except CommError as error:
                raise self.explained(error) from error.__cause__

    def _run(self, start: Callable[[], _Result]) -> _Result:
        """Shared memory itself compares what its collectives are about: it is told."""
        if isinstance(self.inner, SharedMemoryCollectives):
            self.inner.exchange.about = zlib.crc32(self.label.encode())
        return start()

    def _check(self, verb: str, full: Tensor, shard: Tensor | None) -> None:
        """The seam checks its arguments as well, but only when it is asked to start."""
        if shard is None:
            check_flat(verb, full)
        else:
            check_shard_of(verb, shard, full, self.size)
        if verb in ("all_reduce", "reduce_scatter"):
            check_reducible(verb, full)

    def explained(self, error: CommError) -> CommError:
        """`error` with the report of where all ranks are."""
        is_late = not isinstance(error, (DivergedError, RankLostError))
        return type(error)(f"{error}\n{self._watch.explain(self.record, is_late=is_late)}")


class _Recorded:
    """A launched collective; its wait is known to the watchdog."""

    __slots__ = ("_group", "_number", "_work")

    def __init__(self, group: RecordingCollectives, work: Work, number: int) -> None:
        self._group, self._work, self._number = group, work, number

    def wait(self) -> None:
        record = self._group.record
        record.waiting = self._number, get_ident()  # `waiting_for`, without the price of a block
        try:
            self._work.wait()
        except CommError as error:
            raise self._group.explained(error) from error.__cause__
        finally:
            record.waiting = None
            record.waits += 1
