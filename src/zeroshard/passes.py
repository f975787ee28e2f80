"""From what modules and autograd do to points: which forwards and backwards run, and which buckets they need.

Hooks on modules call `enter` and `leave`, those on parameters `arrive`, guarded parameters `touch`; hooks on the
outputs of a forward tell when backward comes to it. Each of them becomes a point of the executor: F and f around a
use in forward, B and b around one in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zeroshard.executor import Executor
from zeroshard.guard import refuse_access
from zeroshard.precision import tensors_in
from zeroshard.reads import UnannouncedReads
from zeroshard.trace import Action, Kind
from zeroshard.unwinding import NEVER, Unwinding

__all__ = ["Passes"]


@dataclass
class _Frame:
    """One forward of a unit."""

    began: int
    """When: the count of forwards that began or ended so far."""
    touched: list[int] = field(default_factory=list)
    """Buckets that were touched, not announced."""


class Passes:
    """Tells one engine's executor what its model does."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._uses = executor, executor.uses
        self.untrained: set[int] = set()
        """Buckets of which no parameter requires grad now (`Trainables` says which)."""
        self.on_backward: Callable[[], None] | None = None
        """Called when a backward starts, before its first point."""
        self._closed = False
        """The engine is gone; hooks on the graphs it left behind do nothing."""
        self._depth = 0
        self._frames: list[_Frame] = []
        self._order = Unwinding()
        self._leaf_hooks: list[RemovableHandle] = []
        """On tensors that outlive the graph: they would be there again for every forward."""
        freed = [buffer for buffer in executor.buffers if not buffer.layout.resident]
        self._has_gathers = bool(freed)
        bucket_at = {buffer.full.untyped_storage()._cdata: buffer.layout.index for buffer in freed}
        self._reads = UnannouncedReads(bucket_at, self._stray)
        executor.on_path_end = self._abandon
        for buffer in executor.buffers:
            buffer.watcher = self

    def end_step(self) -> None:
        """The optimizer is about to change the weights: nothing made from the old ones is kept."""
        self._executor.end_path()
        for use in self._uses:
            use.pinned = False
        while self._leaf_hooks:
            self._leaf_hooks.pop().remove()
        self._executor.drop_unclaimed()

    def close(self) -> None:
        """Hooks on graphs that are still around do nothing from here on."""
        self._closed = True
        self.on_backward = None

    def _abandon(self) -> None:
        """The path is over. What is still open was left by an exception and never reported its end."""
        self._order.abandon()
        self._frames, self._depth = [], 0
        self._reads.abandon()
        for use in self._uses:
            use.forwards = use.backwards = 0

    # ---- forward ------------------------------------------------------------------------------------

    def enter(self, buckets: Sequence[int], compiled: Callable[[], bool] = bool) -> None:
        """A unit's forward starts. The outermost one, outside backward, starts a path.

        `compiled`: whether it runs graphs of torch.compile.
        """
        if not self._depth and not self.in_backward:
            self._executor.begin_path()
            if self._executor.clock is not None:
                self._executor.clock.start("forward")
        self._depth += 1
        self._frames.append(_Frame(self._order.tick()))
        for bucket in buckets:
            self._begin_forward(bucket)
        wanted = self._executor.plan is None and torch.is_grad_enabled() and not self.in_backward
        self._reads.enter(wanted=wanted, compiled=compiled)

    def _begin_forward(self, bucket: int) -> None:
        self._uses[bucket].forwards += 1
        if self._executor.records_grad and bucket not in self.untrained and not self.in_backward:
            self._order.begin_use(bucket)
        self._executor.at(Kind.FORWARD, bucket)

    def _end_forward(self, bucket: int) -> None:
        use = self._uses[bucket]
        use.forwards = max(use.forwards - 1, 0)
        if not self.in_backward:
            self._order.end_use(bucket)
        self._executor.at(Kind.END_FORWARD, bucket)

    def _stray(self, bucket: int) -> None:
        """Backward is about to read a bucket. If no B announced it, gather it, and remember for next time."""
        use, task = self._uses[bucket], _graph_task()
        if self._closed or use.pinned or self._order.is_open(task, bucket):
            return
        self._enter_backward()
        use.strays = True
        self._open(task, bucket, 0)  # by which forward is not known: until the task ends
        self._executor.perform(Action(Kind.GATHER, bucket))
        self._executor.perform(Action(Kind.WAIT, bucket))

    @property
    def touched_here(self) -> Sequence[int]:
        """Buckets that were touched, not announced, in the innermost forward so far."""
        return self._frames[-1].touched if self._frames else ()

    def leave(self, buckets: Sequence[int], outputs: Sequence[Tensor], may_save: bool) -> None:
        """A unit's forward ended, also by an exception.

        `may_save`: autograd may have saved weights inside. If then no output can announce the backward, or
        an output is a view of the weights, the buckets are pinned rather than freed under a saved view.
        """
        self._reads.leave()
        frame = self._frames.pop() if self._frames else _Frame(0)
        used = (*buckets, *frame.touched)
        # Once gathered by a touch, a weight is a plain parameter for what follows: only the outputs tell.
        announced = self._watch(outputs, used, frame.began)
        self._reads.forget(outputs, used)
        for bucket in used:
            if not self._executor.layout.buckets[bucket].resident:
                buffer = self._executor.buffers[bucket]
                use = self._uses[bucket]
                unsafe = may_save and (use.strays or not announced)
                if unsafe or any(map(buffer.shares_memory, outputs)):
                    use.pinned = True
            self._end_forward(bucket)
        self._depth = max(self._depth - 1, 0)
        if self._executor.clock is not None and not self._depth and not self.in_backward:
            self._executor.clock.stop("forward")

    def touch(self, bucket: int, parameter: str, operation: str) -> None:
        """A sharded parameter is used by code that no unit announces (see `guard`)."""
        layout = self._executor.layout.buckets[bucket]
        if not self._depth and not self.in_backward:
            shape = layout.slots[self._executor.layout.slot_of[parameter][1]].spec.shape
            raise refuse_access(parameter, shape, layout.shards, operation)
        self._begin_forward(bucket)
        if self._frames:
            self._frames[-1].touched.append(bucket)
        else:
            self._uses[bucket].pinned = True
            self._end_forward(bucket)

    def touched(self, bucket: int, result: Any) -> None:
        """Watch the backward of what was made from a touched parameter."""
        tensors = tensors_in(result)
        if any(map(self._executor.buffers[bucket].shares_memory, tensors)):
            self._uses[bucket].pinned = True
        self._watch(tensors, (bucket,), self._order.tick())

    def _watch(self, tensors: Sequence[Tensor], buckets: Sequence[int], began: int) -> bool:
        """Report B for `buckets` when the first gradient of `tensors` comes; False if none will.

        `began`: the moment before which nothing of the forward that made them ran.
        """
        watched = [tensor for tensor in tensors if tensor.requires_grad]
        if not buckets:
            return bool(watched)
        latest, ended, recomputes = -1, self._order.tick(), self.in_backward
        if any(tensor.is_leaf for tensor in watched):
            ended = NEVER  # the gradient of a leaf keeps no order: it comes as soon as it can

        def before_backward(_: Tensor) -> None:
            nonlocal latest
            task = _graph_task()
            if self._closed:  # the weights are all there, for good
                return
            if task != latest:
                latest = task
                self._enter_backward()
                # The backward of what was recomputed stands where the forward was that it repeats.
                for bucket in self._order.finished(self._order.repeated(buckets) if recomputes else ended):
                    self._executor.reduces.early = True
                    self._executor.perform(Action(Kind.REDUCE, bucket))
                self._close(task, ended)
                for bucket in buckets:
                    # With create_graph, a later backward of this one reads the weights unannounced.
                    self._uses[bucket].pinned |= torch.is_grad_enabled()
                    self._open(task, bucket, began)
                    self._executor.at(Kind.BACKWARD, bucket)

        for tensor in watched:
            handle = tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:
                self._leaf_hooks.append(handle)
        return bool(watched)

    # ---- backward -----------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        return _graph_task() != -1

    @property
    def is_outermost(self) -> bool:
        """The forward that runs was called from outside of the model, or recomputes a part of it."""
        return self._depth == 1

    def _enter_backward(self) -> None:
        """The first report of a graph task: its end is watched from here on."""
        task = _graph_task()
        if self._order.knows(task):
            return
        if self._order.is_running:
            self._executor.reduces.nested = True
        else:
            if self.on_backward is not None:
                self.on_backward()
            if self._executor.clock is not None:
                self._executor.clock.start("backward")
            self._executor.reduces.begin()
        self._order.enter(task)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_task(task))

    def arrive(self, bucket: int, index: int, gradient: Tensor) -> None:
        """A parameter's gradient is there. It may come several times in one backward (reentrant checkpoints).

        Which gradients come, and so when a bucket is complete, depends on this rank's data where it chooses among
        weights (experts). Where a rank also waits for gathers of its peers, that must decide about nothing.
        """
        self._enter_backward()
        buffer = self._executor.gradients[bucket]
        assert buffer is not None, f"a gradient arrived for frozen bucket {bucket}"
        if buffer.collect(index, gradient, _graph_task()) and not self._has_gathers:
            self._executor.perform(Action(Kind.REDUCE, bucket))

    def _open(self, task: int, bucket: int, began: int) -> None:
        self._uses[bucket].backwards += self._order.open(task, bucket, began)

    def _close(self, task: int, ended: int) -> None:
        """The task comes to a forward that ended at that moment: report b for what ran only after it."""
        for bucket in self._order.over(task, ended):
            self._uses[bucket].backwards -= 1
            self._executor.at(Kind.END_BACKWARD, bucket)

    def _end_task(self, task: int) -> None:
        if not self._order.knows(task):
            return  # left behind by a backward that raised
        self._close(task, -1)
        self._order.leave(task)
        if not self._order.is_running:
            self._executor.reduces.end()
            self._executor.drop_unclaimed()
            if self._executor.clock is not None:
                self._executor.clock.stop("backward")


def _graph_task() -> int:
    """The running backward on this thread, -1 outside one."""
    return int(torch._C._current_graph_task_id())
