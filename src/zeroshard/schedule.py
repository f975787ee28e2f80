"""From the trace of a step to the schedule of the next: small pure passes, each adding one thing.

Worked example: two buckets of 10 elements, one forward and backward, nothing kept, 10 elements ahead.

    trace             0F 0f 1F 1f 1B 1b 0B 0b
    add_gather_free   0GATHER 0WAIT 0F 0f 0FREE 1GATHER 1WAIT 1F 1f 1FREE 1GATHER 1WAIT 1B 1b 1FREE 0GATHER ...
    drop_short_reuse  ... 1F 1f 1B 1b 1FREE ...          (1 is used again at once: not freed)
    hoist_gathers     0GATHER 0WAIT 1GATHER 0F 0f 0FREE 1WAIT 1F 1f 0GATHER 1B 1b 1FREE 0WAIT 0B 0b 0FREE
    add_reduce        ... 1b 1REDUCE 1FREE 0WAIT 0B 0b 0REDUCE 0FREE

`verify` then walks the result with the rules in mind and refuses what breaks one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zeroshard.errors import ScheduleError
from zeroshard.layout import Layout
from zeroshard.policy import Policy
from zeroshard.trace import POINTS, Action, Kind, digest, format_actions, parse_actions

__all__ = [
    "MAX_IN_FLIGHT",
    "Schedule",
    "Step",
    "add_gather_free",
    "add_reduce",
    "compile_schedule",
    "drop_short_reuse",
    "expected_trace",
    "hoist_gathers",
    "live_elements",
    "verify",
]

MAX_IN_FLIGHT = 2
"""Gathers launched but not yet needed, at any time: bounds the memory that running ahead can take."""

_BEGIN = frozenset({Kind.FORWARD, Kind.BACKWARD})
_AFTER = frozenset({Kind.FREE, Kind.REDUCE})


@dataclass(frozen=True)
class Step:
    """One point of the plan with what is done just before it and just after it."""

    before: tuple[Action, ...]
    point: Action
    after: tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """An ordering as a value: it prints, parses back, and has a digest that ranks compare."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return format_actions(self.actions)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        return cls(parse_actions(text))

    @property
    def points(self) -> tuple[Action, ...]:
        """The trace this schedule was made for."""
        return tuple(action for action in self.actions if action.kind in POINTS)

    @property
    def digest(self) -> int:
        return digest(self.actions)

    def steps(self) -> tuple[Step, ...]:
        """The schedule cut at its points: frees and reduces belong to the point before them, gathers and
        waits to the point after. Frees at the very start or gathers at the very end cannot occur."""
        steps: list[Step] = []
        before: list[Action] = []
        for action in self.actions:
            if action.kind in POINTS:
                steps.append(Step(before=tuple(before), point=action, after=()))
                before = []
            elif action.kind in _AFTER and not before and steps:
                last = steps[-1]
                steps[-1] = Step(before=last.before, point=last.point, after=(*last.after, action))
            else:
                before.append(action)
        return tuple(steps)


def compile_schedule(trace: Sequence[Action], layout: Layout, policy: Policy) -> Schedule:
    """The schedule for a step that does what `trace` did."""
    numel = {bucket.index: bucket.padded for bucket in layout.buckets}
    resident = {bucket.index for bucket in layout.buckets if bucket.resident}
    trainable = {bucket.index for bucket in layout.buckets if bucket.trainable}
    actions = add_gather_free(trace, resident)
    actions = drop_short_reuse(actions, numel, policy.max_reuse_distance, policy.max_live)
    actions = hoist_gathers(actions, numel, policy.prefetch, policy.max_live)
    actions = add_reduce(actions, trainable)
    verify(actions, numel, resident, policy.max_live)
    return Schedule(actions)


def expected_trace(layout: Layout) -> tuple[Action, ...]:
    """What a step will most likely do: units forward in order of definition, backward in reverse.

    Good enough for a bill before the first step; the first step itself replaces it.
    """
    forward: list[Action] = []
    backward: list[Action] = []
    for unit in layout.units:
        buckets = [bucket for bucket in unit.buckets if not layout.buckets[bucket].resident]
        forward += [Action(kind, b) for kind in (Kind.FORWARD, Kind.END_FORWARD) for b in buckets]
        ends = [Action(kind, b) for kind in (Kind.BACKWARD, Kind.END_BACKWARD) for b in buckets]
        backward = ends + backward
    return (*forward, *backward)


def add_gather_free(trace: Iterable[Action], resident: Collection[int]) -> tuple[Action, ...]:
    """The demand schedule: gather at use, free after use; resident buckets are only waited for.

    A bucket is in use from F to f and from B to b. Uses nest (a recomputed forward inside a backward), so
    it is freed when the last one ends; what never ends is freed last.
    """
    actions: list[Action] = []
    uses = _Uses()
    live: dict[int, None] = {}
    waited: set[int] = set()
    for point in trace:
        kind, bucket = point
        if bucket in resident:
            if bucket not in waited:
                waited.add(bucket)
                actions.append(Action(Kind.WAIT, bucket))
            actions.append(point)
            continue
        if kind in _BEGIN and bucket not in live:
            live[bucket] = None
            actions += [Action(Kind.GATHER, bucket), Action(Kind.WAIT, bucket)]
        uses.see(kind, bucket)
        actions.append(point)
        if bucket in live and not uses.has(bucket):
            del live[bucket]
            actions.append(Action(Kind.FREE, bucket))
    actions += [Action(Kind.FREE, bucket) for bucket in live]
    return tuple(actions)


class _Uses:
    """Who is between F and f, or between B and b."""

    def __init__(self) -> None:
        self._forwards: dict[int, int] = {}
        self._backwards: set[int] = set()

    def see(self, kind: Kind, bucket: int) -> None:
        if kind is Kind.FORWARD:
            self._forwards[bucket] = self._forwards.get(bucket, 0) + 1
        elif kind is Kind.END_FORWARD:
            self._forwards[bucket] = max(self._forwards.get(bucket, 0) - 1, 0)
        elif kind is Kind.BACKWARD:
            self._backwards.add(bucket)
        elif kind is Kind.END_BACKWARD:
            self._backwards.discard(bucket)

    def has(self, bucket: int) -> bool:
        return bool(self._forwards.get(bucket)) or bucket in self._backwards


def drop_short_reuse(
    actions: Sequence[Action], numel: Mapping[int, int], distance: int, budget: int
) -> tuple[Action, ...]:
    """Keep a bucket that is used again before more than `distance` elements of others are, while no more than
    `budget` elements are gathered."""
    kept = list(actions)
    index = 0
    while index < len(kept):
        if kept[index].kind is Kind.FREE:
            again = _next_gather(kept, index, numel, distance)
            if again is not None:
                bucket = kept[index].bucket
                live = live_elements(kept[: again + 1], numel)
                if max(live[index:again], default=0) + numel[bucket] <= budget:
                    del kept[again : again + 2]
                    del kept[index]
                    continue
        index += 1
    return tuple(kept)


def _next_gather(actions: Sequence[Action], free: int, numel: Mapping[int, int], distance: int) -> int | None:
    """Where the bucket freed at `free` is gathered next, if that is within `distance`."""
    used = 0
    for index in range(free + 1, len(actions)):
        kind, bucket = actions[index]
        if bucket == actions[free].bucket and kind is Kind.GATHER:
            return index
        if kind in _BEGIN:
            used += numel[bucket]
            if used > distance:
                return None
    return None


def hoist_gathers(
    actions: Sequence[Action], numel: Mapping[int, int], prefetch: int, budget: int
) -> tuple[Action, ...]:
    """Launch each gather before earlier compute, as far ahead as the limits allow.

    A gather may start while fewer than `prefetch` elements and `MAX_IN_FLIGHT` buckets are in flight, so a
    bucket larger than `prefetch` still runs one ahead, where gathered elements stay within `budget`.
    """
    moved = list(actions)
    if prefetch <= 0:
        return tuple(moved)
    for index in range(len(moved)):
        if moved[index].kind is Kind.GATHER:
            target = _earliest(moved, index, numel, prefetch, budget)
            moved.insert(target, moved.pop(index))
    return tuple(moved)


def _earliest(
    actions: Sequence[Action], index: int, numel: Mapping[int, int], prefetch: int, budget: int
) -> int:
    """The first place, before a point, to which the gather at `index` may move."""
    bucket = actions[index].bucket
    live = live_elements(actions[:index], numel)
    ahead = _in_flight(actions[:index], numel)
    target, place = index, index - 1
    while place >= 0 and actions[place].bucket != bucket:
        elements, count = ahead[place]
        before_elements, before_count = ahead[place - 1] if place else (0, 0)
        if live[place] + numel[bucket] > budget or count >= MAX_IN_FLIGHT or elements >= prefetch:
            break
        if actions[place].kind in _BEGIN and before_elements < prefetch and before_count < MAX_IN_FLIGHT:
            target = place
        place -= 1
    return target


def _in_flight(actions: Sequence[Action], numel: Mapping[int, int]) -> list[tuple[int, int]]:
    """(elements, buckets) gathered but not yet waited for, after each action."""
    flying: set[int] = set()
    history = []
    elements = 0
    for kind, bucket in actions:
        if kind is Kind.GATHER:
            flying.add(bucket)
            elements += numel[bucket]
        elif kind is Kind.WAIT and bucket in flying:
            flying.remove(bucket)
            elements -= numel[bucket]
        history.append((elements, len(flying)))
    return history


def add_reduce(actions: Iterable[Action], trainable: Collection[int]) -> tuple[Action, ...]:
    """Hand each bucket's gradient to reduction when its backward is over.

    Of a bucket that is used several times the executor makes only the last one: it knows which that is.
    """
    out: list[Action] = []
    for action in actions:
        out.append(action)
        if action.kind is Kind.END_BACKWARD and action.bucket in trainable:
            out.append(Action(Kind.REDUCE, action.bucket))
    return tuple(out)


def live_elements(actions: Iterable[Action], numel: Mapping[int, int]) -> list[int]:
    """Gathered elements (resident buckets not counted) after each action."""
    live, history = 0, []
    for kind, bucket in actions:
        if kind is Kind.GATHER:
            live += numel[bucket]
        elif kind is Kind.FREE:
            live -= numel[bucket]
        history.append(live)
    return history


def verify(
    actions: Sequence[Action], numel: Mapping[int, int], resident: Collection[int], budget: int
) -> None:
    """Refuse a schedule that would read what is not there, leak, or exceed the budget.

    What is needed cannot be refused, so more than `budget` elements may be gathered where all of them are in
    use: what is kept or gathered ahead is within it. Raises ScheduleError with the schedule printed and an arrow
    at the action that breaks a rule.
    """
    state: dict[int, str] = {}
    uses = _Uses()
    live = 0
    for index, (kind, bucket) in enumerate(actions):
        now = state.get(bucket, "sharded")
        if kind is Kind.GATHER:
            _require(now == "sharded", actions, index, f"gathers bucket {bucket}, which is {now}")
            live += numel[bucket]
            if live > budget:
                spare = any(state[other] != "sharded" and not uses.has(other) for other in state)
                needed = not spare and _next_point(actions, index) == bucket
                _require(needed, actions, index, f"{live} elements gathered, budget {budget}")
            state[bucket] = "in flight"
        elif kind is Kind.WAIT and bucket not in resident:
            _require(now == "in flight", actions, index, f"waits for bucket {bucket}, which is {now}")
            state[bucket] = "gathered"
        elif kind is Kind.FREE:
            _require(now == "gathered", actions, index, f"frees bucket {bucket}, which is {now}")
            state[bucket] = "sharded"
            live -= numel[bucket]
        elif kind in _BEGIN and bucket not in resident:
            _require(now == "gathered", actions, index, f"computes with bucket {bucket}, which is {now}")
        uses.see(kind, bucket)
    left = sorted(bucket for bucket, now in state.items() if now != "sharded")
    _require(not left, actions, len(actions) - 1, f"buckets {left} are still gathered at the end")


def _next_point(actions: Sequence[Action], index: int) -> int | None:
    """The bucket of the first point after `index`."""
    return next((action.bucket for action in actions[index + 1 :] if action.kind in POINTS), None)


def _require(holds: bool, actions: Sequence[Action], index: int, problem: str) -> None:
    if holds:
        return
    words = [str(action) for action in actions]
    shown = " ".join([*words[:index], f"-->{words[index]}<--", *words[index + 1 :]])
    raise ScheduleError(f"schedule breaks a rule at action {index}: {problem}\n  {shown}")
