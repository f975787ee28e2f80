"""The one small loop that runs a step: `passes` reports points, the executor does what the plan says there.

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
from dataclasses import dataclass

import torch

from zeroshard.buffers import FlatBuffer
from zeroshard.clock import Clock
from zeroshard.comm import Collectives
from zeroshard.errors import ShardedAccessError
from zeroshard.gradients import GradientBuffer
from zeroshard.layout import Layout
from zeroshard.paths import Paths, Plan
from zeroshard.policy import Policy
from zeroshard.reductions import ReduceQueue
from zeroshard.trace import Action, Kind, digest

__all__ = ["Executor", "Use"]

log = logging.getLogger("zeroshard")


@dataclass
class Use:
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
        self.on_path_end: Callable[[], None] | None = None
        """Called when a path is over, before what nobody needs is freed."""
        self.clock: Clock | None = None
        """Times the phases of a step, when somebody wants to know."""
        self.peak_gathered = 0
        """Bytes of non-resident `full` buffers alive at once, the most so far."""
        self.divergences = 0
        """Steps that left every known path."""
        self.gather_digest = 0
        """Of all gathers launched; equal on all ranks unless they ran different modules."""
        self._warn_of_divergence = warn_of_divergence
        self.buffers, self.gradients = buffers, gradients
        self.uses = [Use() for _ in buffers]
        self.paths = Paths(layout, policy)
        self.plan: Plan | None = None
        """What the path that runs follows; None: by demand."""
        self.records_grad = True
        """So does autograd, on this path."""
        self._run = {
            Kind.GATHER: self._gather,
            Kind.WAIT: self._wait,
            Kind.FREE: self._free,
            Kind.REDUCE: self.reduces.ready,
        }
        self._trace: list[Action] = []
        self._path_open = False
        self._counted: set[int] = set()
        """Live buckets that count as gathered by a step, not by `holding`."""

    # ---- points -------------------------------------------------------------------------------------

    def at(self, kind: Kind, bucket: int) -> None:
        """The model has come to a point."""
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
            if action.kind is not Kind.REDUCE:  # made by `passes`, once per backward
                self.perform(action)
        if kind in (Kind.END_FORWARD, Kind.END_BACKWARD):
            self._guard_kept(bucket)

    def _guard_kept(self, bucket: int) -> None:
        """A bucket that the plan keeps until its next use is not free for all: a use by code that no unit announces
        (see `Passes.touch`) is to be seen, or its backward would not be, and the plan would miss a point."""
        buffer = self.buffers[bucket]
        if buffer.is_live and not buffer.layout.resident and not self.uses[bucket].is_open:
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
        plan, position = self.plan, len(self._trace)
        if plan is None:
            return None
        if plan.expects(position, point):
            return plan
        self.plan = self.paths.beginning_with(self.records_grad, (*self._trace, point))
        self.drop_unclaimed()
        if self.plan is None:
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
        return self.plan

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
        if not resident and not self.uses[bucket].is_open:
            self.perform(Action(Kind.FREE, bucket))

    # ---- actions ------------------------------------------------------------------------------------

    def _gather(self, bucket: int) -> None:
        buffer = self.buffers[bucket]
        if buffer.is_live:
            return
        self.gather_digest = digest([Action(Kind.GATHER, bucket)], self.gather_digest)
        buffer.gather()
        if not self.uses[bucket].claims:
            self._counted.add(bucket)
            live = sum(self.buffers[index].layout.nbytes for index in self._counted)
            self.peak_gathered = max(self.peak_gathered, live)

    def _wait(self, bucket: int) -> None:
        if not self.layout.buckets[bucket].resident:
            self._gather(bucket)
        if self.clock is None:
            self.buffers[bucket].wait()
        else:
            with self.clock.phase("gather wait"):
                self.buffers[bucket].wait()

    def _free(self, bucket: int) -> None:
        buffer = self.buffers[bucket]
        if buffer.layout.resident or not buffer.is_live or self.uses[bucket].is_open:
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

    # ---- paths --------------------------------------------------------------------------------------

    def begin_path(self) -> None:
        """A forward starts that nothing of this model is around."""
        self.end_path()
        self.records_grad = torch.is_grad_enabled()
        if self.on_path is not None:
            self.on_path()
        self._path_open = True
        self.plan = self.paths.expected(self.records_grad)

    def end_path(self) -> None:
        """The path is over: plan it if it is new, and leave nothing gathered that nobody needs."""
        if not self._path_open:
            return
        self._path_open, self.plan = False, None
        trace, self._trace = tuple(self._trace), []
        if self.on_path_end is not None:
            self.on_path_end()
        self.drop_unclaimed()
        if trace:
            self.paths.learn(self.records_grad, trace)

    def plan_anew(self, layout: Layout) -> None:
        """Other buckets train from here on: what was planned is void. Between two paths, on all ranks."""
        self.layout, self.paths = layout, Paths(layout, self.policy)
        self.reduces.order = list(layout.reduce_order)

    def drop_unclaimed(self) -> None:
        for bucket, use in enumerate(self.uses):
            if not use.is_open:
                self._free(bucket)

    def close(self) -> None:
        """Let go of all buffers."""
        self.buffers, self.gradients = (), ()
        self.reduces = ReduceQueue((), (), ())
        self._run = {}
        self.on_path = self.on_path_end = None

    # ---- access from outside ------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Inside a `holding` block."""
        return any(use.claims for use in self.uses)

    @contextmanager
    def holding(self, buckets: Sequence[int]) -> Iterator[None]:
        """Gather `buckets` and keep them until the block ends. All ranks enter and leave."""
        for bucket in buckets:
            self.uses[bucket].claims += 1
            self.perform(Action(Kind.GATHER, bucket))
        try:
            for bucket in buckets:
                self.perform(Action(Kind.WAIT, bucket))
            yield
        finally:
            for bucket in buckets:
                self.uses[bucket].claims -= 1
                self.perform(Action(Kind.FREE, bucket))
