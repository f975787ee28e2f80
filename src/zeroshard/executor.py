"""The one small loop that runs a step: hooks report points, the executor does what the plan says there.

`at(point)` is everything. With a plan that expects this point, the plan's actions around it are run; without
one, or after the step has left the plan, the demand rules are: gather and wait at the start of a use, free at
its end. Both go through the same table of actions, so unplanned is only slower.

A plan is made from the trace of a finished path. It is a hint, never a promise: when a point differs, the
executor looks for another known path that agrees with everything so far, and else goes on by demand; the new
path is planned for its next visit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zeroshard.buffers import FlatBuffer
from zeroshard.clock import Clock
from zeroshard.comm import Collectives
from zeroshard.errors import ShardedAccessError
from zeroshard.gradients import GradientBuffer
from zeroshard.guard import refuse_access
from zeroshard.layout import Layout
from zeroshard.paths import Paths, Plan
from zeroshard.policy import Policy
from zeroshard.reads import UnannouncedReads
from zeroshard.reductions import ReduceQueue
from zeroshard.trace import Action, Kind, digest
from zeroshard.unwinding import NEVER, Unwinding

__all__ = ["Executor"]

log = logging.getLogger("zeroshard")


@dataclass
class _Frame:
    """One forward of a unit."""

    began: int
    """When: the count of forwards that began or ended so far."""
    touched: list[int] = field(default_factory=list)
    """Buckets that were touched, not announced."""


@dataclass
class _Use:
    """Who needs a bucket now: it is freed only when nobody does."""

    forwards: int = 0
    """Forwards between F and f."""
    backwards: int = 0
    """Autograd graph tasks between B and b."""
    pinned: bool = False
    """A view of the weights went where no point can follow it: kept until the step."""
    strays: bool = False
    """Backward has read the weights outside of B to b: from now on, what autograd saves pins them."""
    claims: int = 0
    """Open `holding` blocks."""

    @property
    def is_open(self) -> bool:
        return bool(self.forwards or self.backwards or self.pinned or self.claims)


class Executor:
    """Runs one engine's steps. Knows buckets and points, not modules."""

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        buffers: Sequence[FlatBuffer],
        gradients: Sequence[GradientBuffer | None],
        groups: Sequence[Collectives],
        *,
        warn_of_divergence: bool = False,
    ) -> None:
        """`groups` together hold all ranks: over them gradients are reduced."""
        self.layout, self.policy = layout, policy
        self.reduces = ReduceQueue(gradients, layout.reduce_order, groups)
        self.on_action: Callable[[Action], None] | None = None
        """Called with every point and action as it runs: how tests and measurements look on."""
        self.on_path: Callable[[], None] | None = None
        """Called before a path begins."""
        self.untrained = {bucket.index for bucket in layout.buckets if not bucket.trainable}
        """Buckets of which no parameter requires grad now."""
        self.on_backward: Callable[[], None] | None = None
        """Called when a backward starts, before its first point."""
        self.clock: Clock | None = None
        """Times the phases of a step, when somebody wants to know."""
        self.closed = False
        """The engine is gone; hooks on the graphs it left behind do nothing."""
        self.peak_gathered = 0
        """Bytes of non-resident `full` buffers alive at once, the most so far."""
        self.divergences = 0
        """Steps that left every known path."""
        self.gather_digest = 0
        """Of all gathers launched; equal on all ranks unless they ran different modules."""
        self._warn_of_divergence = warn_of_divergence
        self._buffers, self._gradients = buffers, gradients
        self._run = {
            Kind.GATHER: self._gather,
            Kind.WAIT: self._wait,
            Kind.FREE: self._free,
            Kind.REDUCE: self.reduces.ready,
        }
        self._uses = [_Use() for _ in buffers]
        self._depth = 0
        self._frames: list[_Frame] = []
        self._order = Unwinding()
        self._has_gathers = not all(buffer.layout.resident for buffer in buffers)
        bucket_at = {
            buffer.full.untyped_storage()._cdata: buffer.layout.index
            for buffer in buffers
            if not buffer.layout.resident
        }
        self._reads = UnannouncedReads(bucket_at, self._stray)
        self._trace: list[Action] = []
        self._records_grad = True
        self.paths = Paths(layout, policy)
        self._plan: Plan | None = None
        self._path_open = False
        self._leaf_hooks: list[RemovableHandle] = []
        self._counted: set[int] = set()
        """Live buckets that count as gathered by a step, not by `holding`."""
        for buffer in buffers:
            buffer.watcher = self

    # ---- points -------------------------------------------------------------------------------------

    def at(self, kind: Kind, bucket: int) -> None:
        """A hook reports a point."""
        point = Action(kind, bucket)
        plan = self._follow(point)
        if self._path_open:
            self._trace.append(point)
        if plan is None:
            self._demand(point)
            return
        step = plan.steps[len(self._trace) - 1]
        for action in step.before:
            self.perform(action)
        if kind in (Kind.FORWARD, Kind.BACKWARD):
            # Nothing to do on the path the plan was made for; after a change of path what it kept is gone.
            self._wait(bucket)
        self._report(point)
        for action in step.after:
            if action.kind is not Kind.REDUCE:  # made by `watch`, once per backward
                self.perform(action)
        if kind in (Kind.END_FORWARD, Kind.END_BACKWARD):
            self._guard_kept(bucket)

    def _guard_kept(self, bucket: int) -> None:
        """A bucket that the plan keeps until its next use is not free for all: a use by code that no unit announces
        (see `touch`) is to be seen, or its backward would not be, and the plan would miss a point."""
        buffer = self._buffers[bucket]
        if buffer.is_live and not buffer.layout.resident and not self._uses[bucket].is_open:
            buffer.guard()

    def perform(self, action: Action) -> None:
        """Run one action."""
        self._report(action)
        self._run[action.kind](action.bucket)

    def _report(self, action: Action) -> None:
        if self.on_action is not None:
            self.on_action(action)

    def _follow(self, point: Action) -> Plan | None:
        """The plan, if it (or another known path with the same beginning) expects this point next."""
        plan, position = self._plan, len(self._trace)
        if plan is None:
            return None
        if plan.expects(position, point):
            return plan
        self._plan = self.paths.beginning_with(self._records_grad, (*self._trace, point))
        self.drop_unclaimed()
        if self._plan is None:
            self.divergences += 1
            if self._warn_of_divergence:
                expected = plan.points[position] if position < len(plan.points) else "its end"
                log.warning(
                    "the step left every known schedule at point %d: it ran %s where %s was expected; the rest "
                    "of the step runs without prefetch (%d times so far)",
                    position,
                    point,
                    expected,
                    self.divergences,
                )
        return self._plan

    def _demand(self, point: Action) -> None:
        """The rules without a plan: the same actions, no lookahead."""
        kind, bucket = point
        resident = self.layout.buckets[bucket].resident
        if kind in (Kind.FORWARD, Kind.BACKWARD):
            if not resident:
                self.perform(Action(Kind.GATHER, bucket))
            self.perform(Action(Kind.WAIT, bucket))
            self._report(point)
            return
        self._report(point)
        if not resident and not self._uses[bucket].is_open:
            self.perform(Action(Kind.FREE, bucket))

    # ---- actions ------------------------------------------------------------------------------------

    def _gather(self, bucket: int) -> None:
        buffer = self._buffers[bucket]
        if buffer.is_live:
            return
        self.gather_digest = digest([Action(Kind.GATHER, bucket)], self.gather_digest)
        buffer.gather()
        if not self._uses[bucket].claims:
            self._counted.add(bucket)
            live = sum(self._buffers[index].layout.nbytes for index in self._counted)
            self.peak_gathered = max(self.peak_gathered, live)

    def _wait(self, bucket: int) -> None:
        if not self.layout.buckets[bucket].resident:
            self._gather(bucket)
        if self.clock is None:
            self._buffers[bucket].wait()
        else:
            with self.clock.phase("gather wait"):
                self._buffers[bucket].wait()

    def _free(self, bucket: int) -> None:
        buffer = self._buffers[bucket]
        if buffer.layout.resident or not buffer.is_live or self._uses[bucket].is_open:
            return
        edited = buffer.edited()
        buffer.free()
        self._counted.discard(bucket)
        if edited:
            raise ShardedAccessError(
                f"parameter {edited[0]!r} was edited in place while it was gathered for compute; the edit is "
                f"lost, since ranks could have edited differently (nn.Embedding's max_norm does this in "
                f"forward). Edit on every rank inside `with engine.gathered(param, modifier_rank=0): ...`."
            )

    # ---- forward ------------------------------------------------------------------------------------

    def enter(self, buckets: Sequence[int], compiled: Callable[[], bool] = bool) -> None:
        """A unit's forward starts. The outermost one, outside backward, starts a path.

        `compiled`: whether it runs graphs of torch.compile.
        """
        if not self._depth and not self.in_backward:
            self._begin_path()
            if self.clock is not None:
                self.clock.start("forward")
        self._depth += 1
        self._frames.append(_Frame(self._order.tick()))
        for bucket in buckets:
            self._begin_forward(bucket)
        wanted = self._plan is None and torch.is_grad_enabled() and not self.in_backward
        self._reads.enter(wanted=wanted, compiled=compiled)

    def _begin_forward(self, bucket: int) -> None:
        self._uses[bucket].forwards += 1
        if self._records_grad and bucket not in self.untrained and not self.in_backward:
            self._order.begin_use(bucket)
        self.at(Kind.FORWARD, bucket)

    def _end_forward(self, bucket: int) -> None:
        use = self._uses[bucket]
        use.forwards = max(use.forwards - 1, 0)
        if not self.in_backward:
            self._order.end_use(bucket)
        self.at(Kind.END_FORWARD, bucket)

    def _stray(self, bucket: int) -> None:
        """Backward is about to read a bucket. If no B announced it, gather it, and remember for next time."""
        use, task = self._uses[bucket], _graph_task()
        if self.closed or use.pinned or self._order.is_open(task, bucket):
            return
        self._enter_backward()
        use.strays = True
        self._open(task, bucket, 0)  # by which forward is not known: until the task ends
        self.perform(Action(Kind.GATHER, bucket))
        self.perform(Action(Kind.WAIT, bucket))

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
        announced = self.watch(outputs, used, frame.began)
        self._reads.forget(outputs, used)
        for bucket in used:
            if not self.layout.buckets[bucket].resident:
                buffer = self._buffers[bucket]
                use = self._uses[bucket]
                unsafe = may_save and (use.strays or not announced)
                if unsafe or any(map(buffer.shares_memory, outputs)):
                    use.pinned = True
            self._end_forward(bucket)
        self._depth = max(self._depth - 1, 0)
        if self.clock is not None and not self._depth and not self.in_backward:
            self.clock.stop("forward")

    def touch(self, bucket: int, parameter: str, operation: str) -> None:
        """A sharded parameter is used by code that no unit announces (see `guard`)."""
        layout = self.layout.buckets[bucket]
        if not self._depth and not self.in_backward:
            shape = layout.slots[self.layout.slot_of[parameter][1]].spec.shape
            raise refuse_access(parameter, shape, layout.shards, operation)
        self._begin_forward(bucket)
        if self._frames:
            self._frames[-1].touched.append(bucket)
        else:
            self._uses[bucket].pinned = True
            self._end_forward(bucket)

    def touched(self, bucket: int, result: Any) -> None:
        """Watch the backward of what was made from a touched parameter."""
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(map(self._buffers[bucket].shares_memory, tensors)):
            self._uses[bucket].pinned = True
        self.watch(tensors, (bucket,), self._order.tick())

    def watch(self, tensors: Sequence[Tensor], buckets: Sequence[int], began: int) -> bool:
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
            if self.closed:  # the weights are all there, for good
                return
            if task != latest:
                latest = task
                self._enter_backward()
                # The backward of what was recomputed stands where the forward was that it repeats.
                for bucket in self._order.finished(self._order.repeated(buckets) if recomputes else ended):
                    self.reduces.early = True
                    self.perform(Action(Kind.REDUCE, bucket))
                self._close(task, ended)
                for bucket in buckets:
                    # With create_graph, a later backward of this one reads the weights unannounced.
                    self._uses[bucket].pinned |= torch.is_grad_enabled()
                    self._open(task, bucket, began)
                    self.at(Kind.BACKWARD, bucket)

        for tensor in watched:
            handle = tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:
                self.remove_after_step(handle)
        return bool(watched)

    def remove_after_step(self, handle: RemovableHandle) -> None:
        """A hook on a tensor that outlives the graph: it would be there again for every forward."""
        self._leaf_hooks.append(handle)

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
            self.reduces.nested = True
        else:
            if self.on_backward is not None:
                self.on_backward()
            if self.clock is not None:
                self.clock.start("backward")
            self.reduces.begin()
        self._order.enter(task)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_task(task))

    def arrive(self, bucket: int, index: int, gradient: Tensor) -> None:
        """A parameter's gradient is there. It may come several times in one backward (reentrant checkpoints).

        Which gradients come, and so when a bucket is complete, depends on this rank's data where it chooses among
        weights (experts). Where a rank also waits for gathers of its peers, that must decide about nothing.
        """
        self._enter_backward()
        buffer = self._gradients[bucket]
        assert buffer is not None, f"a gradient arrived for frozen bucket {bucket}"
        if buffer.collect(index, gradient, _graph_task()) and not self._has_gathers:
            self.perform(Action(Kind.REDUCE, bucket))

    def _open(self, task: int, bucket: int, began: int) -> None:
        self._uses[bucket].backwards += self._order.open(task, bucket, began)

    def _close(self, task: int, ended: int) -> None:
        """The task comes to a forward that ended at that moment: report b for what ran only after it."""
        for bucket in self._order.over(task, ended):
            self._uses[bucket].backwards -= 1
            self.at(Kind.END_BACKWARD, bucket)

    def _end_task(self, task: int) -> None:
        if not self._order.knows(task):
            return  # left behind by a backward that raised
        self._close(task, -1)
        self._order.leave(task)
        if not self._order.is_running:
            self.reduces.end()
            self.drop_unclaimed()
            if self.clock is not None:
                self.clock.stop("backward")

    # ---- paths --------------------------------------------------------------------------------------

    def _begin_path(self) -> None:
        self.end_path()
        self._records_grad = torch.is_grad_enabled()
        if self.on_path is not None:
            self.on_path()
        self._path_open = True
        self._plan = self.paths.expected(self._records_grad)

    def end_path(self) -> None:
        """The path is over: plan it if it is new, and leave nothing gathered that nobody needs."""
        if not self._path_open:
            return
        self._path_open, self._plan = False, None
        trace, self._trace = tuple(self._trace), []
        # What is still open belongs to a forward or backward that raised and never reported its end.
        self._order.abandon()
        self._frames, self._depth = [], 0
        self._reads.abandon()
        for use in self._uses:
            use.forwards = use.backwards = 0
        self.drop_unclaimed()
        if trace:
            self.paths.learn(self._records_grad, trace)

    def plan_anew(self, layout: Layout) -> None:
        """Other buckets train from here on: what was planned is void. Between two paths, on all ranks."""
        self.layout, self.paths = layout, Paths(layout, self.policy)
        self.reduces.order = list(layout.reduce_order)

    def end_step(self) -> None:
        """The optimizer is about to change the weights: nothing made from the old ones is kept."""
        self.end_path()
        for use in self._uses:
            use.pinned = False
        while self._leaf_hooks:
            self._leaf_hooks.pop().remove()
        self.drop_unclaimed()

    def drop_unclaimed(self) -> None:
        for bucket, use in enumerate(self._uses):
            if not use.is_open:
                self._free(bucket)

    def close(self) -> None:
        """Let go of all buffers; hooks on graphs that are still around do nothing from here on."""
        self.closed = True
        self._buffers, self._gradients = (), ()
        self.reduces = ReduceQueue((), (), ())
        self._run = {}
        self.on_backward = self.on_path = None

    # ---- access from outside ------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Inside a `holding` block."""
        return any(use.claims for use in self._uses)

    @contextmanager
    def holding(self, buckets: Sequence[int]) -> Iterator[None]:
        """Gather `buckets` and keep them until the block ends. All ranks enter and leave."""
        for bucket in buckets:
            self._uses[bucket].claims += 1
            self.perform(Action(Kind.GATHER, bucket))
        try:
            for bucket in buckets:
                self.perform(Action(Kind.WAIT, bucket))
            yield
        finally:
            for bucket in buckets:
                self._uses[bucket].claims -= 1
                self.perform(Action(Kind.FREE, bucket))


def _graph_task() -> int:
    """The running backward on this thread, -1 outside one."""
    return int(torch._C._current_graph_task_id())
