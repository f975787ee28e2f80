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
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.arguments import check_flat, check_shard_of
from zeroshard.comm.check import Checker
from zeroshard.comm.record import GroupRecord
from zeroshard.comm.reduction import check_reducible
from zeroshard.comm.seam import Collectives, Work
from zeroshard.comm.shared_memory import SharedMemoryCollectives
from zeroshard.comm.watch import Watch
from zeroshard.errors import CommError, DivergedError, RankLostError

__all__ = ["RecordingCollectives", "labelled"]


class RecordingCollectives:
    """`inner`, recorded. `labelled` gives the same group for one bucket, under its name."""

    def __init__(
        self,
        inner: Collectives,
        record: GroupRecord,
        watch: Watch,
        checker: Checker | None = None,
        label: str = "",
    ) -> None:
        self.inner, self.record, self.label = inner, record, label
        self._watch, self._checker = watch, checker
        self._about = zlib.crc32(label.encode())
        self._compared = inner if isinstance(inner, SharedMemoryCollectives) else None
        """The seam that itself compares what collectives are about."""

    def labelled(self, label: str) -> RecordingCollectives:
        """The same group and record; what is launched through it is about `label`."""
        return RecordingCollectives(self.inner, self.record, self._watch, self._checker, label)

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def rank(self) -> int:
        return self.inner.rank

    def all_gather(self, full: Tensor, shard: Tensor, *, stable: bool = False) -> Work:
        if self._checker is not None:
            check_shard_of("all_gather", shard, full, self.size)
        return self._launch("all_gather", full, lambda: self._seam().all_gather(full, shard, stable=stable))

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Work:
        if self._checker is not None:
            check_shard_of("reduce_scatter", shard, full, self.size)
            check_reducible("reduce_scatter", full)
        return self._launch(
            "reduce_scatter", full, lambda: self._seam().reduce_scatter(shard, full, average=average)
        )

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Work:
        if self._checker is not None:
            check_flat("all_reduce", tensor)
            check_reducible("all_reduce", tensor)
        return self._launch("all_reduce", tensor, lambda: self._seam().all_reduce(tensor, average=average))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        check_flat("broadcast", tensor)
        self._finish("broadcast", tensor, lambda: self._seam().broadcast(tensor, source))

    def sum_to_host(self, values: Tensor) -> list[float]:
        check_flat("sum_to_host", values)
        sums: list[float] = []
        self._finish("sum_to_host", values, lambda: sums.extend(self._seam().sum_to_host(values)))
        return sums

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        if self.record.closed:
            return
        self.record.closed = True
        try:
            self._finish("close", torch.empty(0), lambda: self._seam().close())
        finally:
            self._watch.remove(self.record)

    def _seam(self) -> Collectives:
        """`inner`, told what is launched next."""
        if self._compared is not None:
            self._compared.about = self._about
        return self.inner

    def _launch(self, verb: str, tensor: Tensor, start: Callable[[], Work]) -> Work:
        """An asynchronous verb. Arguments that `start` refuses count as no launch."""
        record = self.record
        if self._checker is not None:
            item, number = self._checker.announce(record, verb, self.label, tensor, start)
            return _Recorded(self, item, number)
        try:
            work = start()
        except (DivergedError, RankLostError) as error:
            with record.waiting_for(record.note(verb, self.label, tensor.numel(), tensor.dtype)):
                raise self.explained(error) from error.__cause__
        return _Recorded(self, work, record.note(verb, self.label, tensor.numel(), tensor.dtype))

    def _finish(self, verb: str, tensor: Tensor, run: Callable[[], Any]) -> None:
        """A verb that blocks."""
        record = self.record
        if self._checker is not None:
            item, number = self._checker.announce(record, verb, self.label, tensor, run, blocks=True)
            _Recorded(self, item, number).wait()
            return
        with record.waiting_for(record.note(verb, self.label, tensor.numel(), tensor.dtype)):
            try:
                run()
            except CommError as error:
                raise self.explained(error) from error.__cause__

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


def labelled(group: Collectives, label: str) -> Collectives:
    """`group` for collectives that are about `label`: the same object where nobody asks what they are about."""
    relabel: Callable[[str], Collectives] | None = getattr(group, "labelled", None)
    return group if relabel is None else relabel(label)
