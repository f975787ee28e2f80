"""The order of reductions: one that all ranks keep, whatever order gradients come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zeroshard.clock import Clock
from zeroshard.comm import Collectives
from zeroshard.gradients import GradientBuffer

__all__ = ["ReduceQueue"]

MAX_REDUCES = 2
"""Reductions in flight; the oldest is waited for before a third is launched, which bounds their memory."""


class ReduceQueue:
    """Launches reductions in one order that all ranks keep, whatever order gradients come in.

    Whatever makes buckets ready at different moments on different ranks cannot reorder collectives into a hang: at
    the end of the round every bucket is reduced, with zeros where nothing came.
    """

    def __init__(
        self,
        gradients: Sequence[GradientBuffer | None],
        order: Sequence[int],
        groups: Sequence[Collectives],
    ) -> None:
        """`groups` together hold all ranks; `order` names every trainable bucket."""
        self.order = list(order)
        self.nested = False
        """The running backward has others inside (reentrant checkpointing): a parameter's gradient may come in
        several parts, the later ones after its bucket was reduced."""
        self.enabled = True
        """False while gradients only accumulate locally (`no_sync`; stages 0 and 1 before the boundary)."""
        self.pending = False
        """A round ended without reduction since the last one that reduced."""
        self.early = False
        """Buckets were reduced before the end of their backward since the last `flush`: gradients may have come
        to them later, of weights that were used where nothing saw it."""
        self.averages = True
        """A step is due: what is reduced is averaged over replicas at once (MiCS)."""
        self.observed: list[int] = []
        """Buckets in the order they became ready in the latest round."""
        self.clock: Clock | None = None
        self._gradients, self._groups = gradients, groups
        self._ready: set[int] = set()
        self._next = 0
        self._flying: list[GradientBuffer] = []
        self._last: set[int] = set()
        """Buckets to which gradients once came after their reduction: reduced at the end of the round."""
        self._averaging: list[GradientBuffer] = []
        self._has_replicas = len(groups) > 1 and all(group.size > 1 for group in groups)
        self._unaveraged = False

    def begin(self) -> None:
        """A backward starts."""
        self.observed = []
        self.nested = False
        self._ready = set()
        self._next = 0

    def ready(self, bucket: int) -> None:
        """No more gradients come to a bucket: launch it, and what waited for it."""
        if bucket in self._last:
            return
        if bucket not in self._ready:
            self._ready.add(bucket)
            self.observed.append(bucket)
        while self.enabled and self._next < len(self.order) and self.order[self._next] in self._ready:
            self._launch(self.order[self._next])
            self._next += 1

    def end(self) -> None:
        """The backward ended: reduce what is left and wait for everything, or remember that it is due."""
        for gradient in self._gradients:
            if gradient is not None:
                gradient.arrived = {}
        if not self.enabled:
            self.pending = True
            return
        for bucket in self.order[self._next :]:
            self._launch(bucket)
        self._next = len(self.order)
        if self.nested and self.order:
            for bucket in self._late():
                self._launch(bucket)
        while self._flying:
            self._finish_oldest()
        self._finish_averages()
        self.pending = False
        self._unaveraged = self._has_replicas and not self.averages

    def _finish_oldest(self) -> None:
        gradient = self._flying.pop(0)
        self._timed(gradient.finish_reduce)
        if self._has_replicas and self.averages:
            self._launch_average(gradient)

    def _launch_average(self, gradient: GradientBuffer) -> None:
        """In the order of the reductions, which all ranks keep."""
        self._finish_averages(MAX_REDUCES - 1)
        gradient.launch_average()
        self._averaging.append(gradient)

    def _finish_averages(self, left: int = 0) -> None:
        while len(self._averaging) > left:
            self._timed(self._averaging.pop(0).finish_average)

    def _timed(self, wait: Callable[[], None]) -> None:
        if self.clock is None:
            wait()
        else:
            with self.clock.phase("reduce wait"):
                wait()

    def _late(self) -> list[int]:
        """Buckets for which gradients came after their reduction, on any rank."""
        device = self._gradient(self.order[0]).device
        flags = [float(self._gradient(bucket).has_local) for bucket in self.order]
        for group in self._groups:
            if group.size > 1:
                flags = group.sum_to_host(torch.tensor(flags, dtype=torch.float64, device=device))
        return [bucket for bucket, flag in zip(self.order, flags, strict=True) if flag]

    def flush(self) -> None:
        """Reduce all that is not reduced yet, and average what has not been."""
        self.flush_pending()
        if self.early:
            self.flush_late()

    def flush_pending(self) -> None:
        """Reduce what only accumulated locally, all buckets at once; average what has not been."""
        if self.pending:
            before, (self.enabled, self.averages) = (self.enabled, self.averages), (True, True)
            self.begin()
            self.end()
            self.enabled, self.averages = before
        elif self._unaveraged:
            for bucket in self.order:
                self._launch_average(self._gradient(bucket))
            self._finish_averages()
            self._unaveraged = False

    @property
    def has_late(self) -> bool:
        """Gradients came on this rank after their bucket was reduced."""
        return self.early and any(gradient is not None and gradient.has_local for gradient in self._gradients)

    def flush_late(self) -> None:
        """Reduce what came after its bucket was reduced, on any rank."""
        self.early = False
        late = self._late()
        self._last.update(late)
        before, self.averages = self.averages, True
        for bucket in late:
            self._launch(bucket)
        while self._flying:
            self._finish_oldest()
        self._finish_averages()
        self.averages = before

    def clear(self) -> None:
        """Drop all gradients."""
        self._flying, self._averaging = [], []
        for gradient in self._gradients:
            if gradient is not None:
                gradient.clear()
        self.pending = self.early = self._unaveraged = False

    def agreed_order(self) -> list[int]:
        """The observed order, completed by the buckets that never became ready."""
        return self.observed + [bucket for bucket in self.order if bucket not in set(self.observed)]

    def _launch(self, bucket: int) -> None:
        if len(self._flying) >= MAX_REDUCES:
            self._finish_oldest()
        gradient = self._gradient(bucket)
        gradient.launch_reduce()
        self._flying.append(gradient)

    def _gradient(self, bucket: int) -> GradientBuffer:
        gradient = self._gradients[bucket]
        assert gradient is not None, f"bucket {bucket} is frozen"
        return gradient
