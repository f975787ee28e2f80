"""The paths a model has taken, each with its plan; what to expect of the next one.

A path is known by whether autograd recorded and by its points. Training, evaluation and each branch of the
user's control flow are paths of their own, planned once and found again by what they begin with.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from zeroshard.layout import Layout
from zeroshard.policy import Policy
from zeroshard.schedule import Schedule, Step, compile_schedule, expected_trace, live_elements
from zeroshard.trace import Action

__all__ = ["MAX_PATHS", "Paths", "Plan"]

MAX_PATHS = 32
"""Plans kept; the least recently used goes first."""


@dataclass(frozen=True)
class Plan:
    """A schedule cut into the steps the executor runs."""

    schedule: Schedule
    points: tuple[Action, ...]
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Plan:
        return cls(schedule, schedule.points, schedule.steps())

    def expects(self, position: int, point: Action) -> bool:
        """`point` is what comes at `position`."""
        return position < len(self.points) and self.points[position] == point


class Paths:
    """The known paths of one model."""

    def __init__(self, layout: Layout, policy: Policy) -> None:
        self._layout, self._policy = layout, policy
        self._plans: OrderedDict[tuple[bool, tuple[Action, ...]], Plan] = OrderedDict()
        self._latest: dict[bool, Plan] = {}

    def expected(self, records_grad: bool) -> Plan | None:
        """The plan of the latest path of this kind: the best guess for the next."""
        return self._latest.get(records_grad)

    def beginning_with(self, records_grad: bool, seen: tuple[Action, ...]) -> Plan | None:
        """The most recently used plan whose path begins with `seen`."""
        for (kind, points), plan in reversed(self._plans.items()):
            if kind == records_grad and points[: len(seen)] == seen:
                return plan
        return None

    def learn(self, records_grad: bool, trace: tuple[Action, ...]) -> None:
        """A path is finished: plan it if it is new, and expect it next."""
        identity = (records_grad, trace)
        plan = self._plans.get(identity)
        if plan is None:
            plan = Plan.of(compile_schedule(trace, self._layout, self._policy))
            self._plans[identity] = plan
            if len(self._plans) > MAX_PATHS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(identity)
        self._latest[records_grad] = plan

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules of the known paths, latest last."""
        return [plan.schedule for plan in self._plans.values()]

    def predicted_peak(self) -> int:
        """Bytes gathered at once that the known schedules allow at most; a guess before the first backward."""
        schedules = self.schedules
        if True not in self._latest:
            schedules.append(compile_schedule(expected_trace(self._layout), self._layout, self._policy))
        nbytes = {bucket.index: bucket.nbytes for bucket in self._layout.buckets}
        return max(max(live_elements(schedule.actions, nbytes), default=0) for schedule in schedules)
