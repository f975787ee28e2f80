"""Where ranks stand when one of them cannot go on, and what that says: pure functions over positions.

A `Position` is what one rank tells: which collectives it has launched, in which one it waits, or where else it
is. From the positions of all ranks follows who can never go on (`doomed`), what was launched last by all alike,
and a likely cause with its cure (`report`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["NO_GRADIENTS", "GroupView", "Launch", "Position", "doomed", "first_difference", "report"]

NO_GRADIENTS = "forward without gradients"
"""The entry of a forward under `torch.no_grad`."""
LOOP = frozenset({"forward", "backward", "step", NO_GRADIENTS})
"""Entries of a loop; every other one is a call that a script makes now and then."""


@dataclass(frozen=True)
class Launch:
    """One collective of one group, as one rank launched it."""

    number: int
    """Its place in the group's order, from 0."""
    verb: str
    label: str
    """What it is about: a bucket and its parameters; empty where the verb serves the whole engine."""
    numel: int
    dtype: str
    entry: str = ""
    """What the script had called; only with ZEROSHARD_DEBUG=collectives. Not compared."""

    def matches(self, other: Launch) -> bool:
        """The same collective on two ranks."""
        mine, theirs = (self.verb, self.label, self.numel, self.dtype), other
        return mine == (theirs.verb, theirs.label, theirs.numel, theirs.dtype)

    def __str__(self) -> str:
        about = f"of {self.label}" if self.label else f"of {self.numel} {self.dtype}"
        return f"{self.verb} {about} (number {self.number})"


@dataclass(frozen=True)
class GroupView:
    """One process group, as one rank sees it."""

    ranks: tuple[int, ...]
    launched: int
    """Collectives launched so far."""
    recent: tuple[Launch, ...]
    """The last of them, oldest first."""

    def at(self, number: int) -> Launch | None:
        return next((launch for launch in self.recent if launch.number == number), None)


@dataclass(frozen=True)
class Position:
    """Where one rank stands."""

    rank: int
    waiting: tuple[str, int] | None = None
    """The group and the number of the collective it waits in; None when it is in none."""
    entry: str = ""
    """What the script called to get there: `forward`, `backward`, `step`, `gathered`, ..."""
    where: str = ""
    """The line of the script."""
    idle: float = 0.0
    """Seconds since it last launched or finished a collective."""
    progress: int = 0
    """Grows with every collective launched or waited for."""
    failed: bool = False
    """It has raised an error there."""
    ended: str = ""
    """Its process has ended, or has let its engine go, and how."""
    frozen: tuple[str, ...] = ()
    """Parameters that `initialize` saw trainable, and that are frozen now."""
    training: bool = True
    """`model.training`."""
    groups: Mapping[str, GroupView] = field(default_factory=dict)

    @property
    def launch(self) -> Launch | None:
        if self.waiting is None or self.waiting[0] not in self.groups:
            return None
        return self.groups[self.waiting[0]].at(self.waiting[1])

    @property
    def is_over(self) -> bool:
        """It will launch nothing any more."""
        return self.failed or bool(self.ended)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Position:
        """The inverse of `encode`."""
        raw: dict[str, Any] = json.loads(text)
        raw["waiting"] = tuple(raw["waiting"]) if raw["waiting"] else None
        raw["frozen"] = tuple(raw["frozen"])
        raw["groups"] = {
            name: GroupView(
                tuple(view["ranks"]), view["launched"], tuple(Launch(**launch) for launch in view["recent"])
            )
            for name, view in raw["groups"].items()
        }
        return Position(**raw)


Positions = Mapping[int, Position]


def _awaited(position: Position, positions: Positions) -> set[int]:
    """The ranks, of those that are known, that have not launched what `position` waits in."""
    if position.waiting is None or position.waiting[0] not in position.groups:
        return set()
    name, number = position.waiting
    missing = set()
    for rank in position.groups[name].ranks:
        other = positions.get(rank)
        if other is not None and rank != position.rank:
            view = other.groups.get(name)
            if (view.launched if view is not None else 0) <= number:
                missing.add(rank)
    return missing


def doomed(positions: Positions) -> set[int]:
    """Ranks that wait, and that no rank which is still running can help: each waits, directly or not, for
    one that is over or for itself."""
    stuck = {rank for rank, p in positions.items() if p.is_over or p.waiting is not None}
    while True:
        free = {
            r for r in stuck if not positions[r].is_over and not _awaited(positions[r], positions) & stuck
        }
        if not free:
            return {rank for rank in stuck if not positions[rank].is_over}
        stuck -= free


def first_difference(
    name: str, positions: Positions, differ: Callable[[Launch, Launch], bool] | None = None
) -> dict[int, Launch]:
    """Of group `name`: the first number under which ranks launched different collectives, by rank; empty when
    there is none among those that are remembered. `differ` compares two launches in another way."""
    views = {rank: p.groups[name] for rank, p in positions.items() if name in p.groups}
    numbers = sorted({launch.number for view in views.values() for launch in view.recent})
    for number in numbers:
        launches = {rank: found for rank, view in views.items() if (found := view.at(number)) is not None}
        values = list(launches.values())
        unequal = differ or (lambda one, other: not one.matches(other))
        if any(unequal(values[0], other) for other in values[1:]):
            return launches
    return {}


def _first_parting(positions: Positions) -> dict[int, str]:
    """By rank: what scripts had called where they first did something different, the collectives being alike."""
    for name in sorted({name for p in positions.values() for name in p.groups}):
        launches = first_difference(name, positions, lambda one, other: one.entry != other.entry)
        if launches and all(launch.entry for launch in launches.values()):
            return {rank: launch.entry for rank, launch in launches.items()}
    return {}


def _last_match(name: str, positions: Positions) -> Launch | None:
    views = [p.groups[name] for p in positions.values() if name in p.groups]
    difference = first_difference(name, positions)
    end = next(iter(difference.values())).number if difference else min(view.launched for view in views)
    return views[0].at(end - 1)


# ---- the report -----------------------------------------------------------------------------------------


def report(rank: int, positions: Positions, asked: Iterable[int]) -> str:
    """What happened, for the error of `rank`: where everybody is, the last match, the cause, the cure.

    `positions` has this rank's own; of the ranks `asked`, those without one have not answered.
    """
    asked = set(asked)
    own = positions[rank]
    lines = ["Where the ranks are:"]
    for ranks, text in _grouped({r: _describe(positions.get(r)) for r in sorted(asked | positions.keys())}):
        lines.append(f"  {_names(ranks)}: {text}")
    name = own.waiting[0] if own.waiting is not None else ""
    if name in own.groups:
        difference = first_difference(name, positions)
        if difference:
            shown = _grouped({r: str(launch) for r, launch in difference.items()})
            each = "; ".join(f"{_names(ranks)} launched {text}" for ranks, text in shown)
            lines.append(f"  The first collective that differs: {each}.")
        match = _last_match(name, positions)
        lines.append(f"  The last one that matched: {match or 'none that is remembered'}.")
    cause, cure = _cause(rank, positions, asked)
    lines.append(f"  Likely cause: {cause}.")
    lines.append(f"  Cure: {cure}.")
    return "\n".join(lines)


def _describe(position: Position | None) -> str:
    if position is None:
        return "no answer: its process is gone or stands still, or it has just moved"
    at = f", at {position.where}" if position.where else ""
    if position.ended:
        return position.ended
    if position.waiting is None:
        return f"in no collective{at}"
    inside = f" in {position.entry}" if position.entry else ""
    return f"waits{inside} for {position.launch or 'a collective'}{at}"


def _grouped(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return [(ranks, text) for text, ranks in groups.items()]


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


_TOGETHER = (
    "give every rank the same number of batches (drop_last, a sampler that pads), or stop together: all-reduce a "
    "flag in every turn of the loop"
)
_GENERATION = (
    "put a loop of forwards whose length differs, such as generation, inside `with "
    "engine.unwrap_for_generation():`, or make all ranks go on until the last one is done (synced_gpus)"
)
_SAME_FLOW = (
    "make control flow the same on all ranks (a rank without work runs the module on a dummy input), or name the "
    "part that differs as one unit with zero_optimization.leaf_module"
)


def _cause(rank: int, positions: Positions, asked: set[int]) -> tuple[str, str]:
    """The first of these that the positions bear out, and what to do about it."""
    own = positions[rank]
    gone = sorted(asked - positions.keys())
    ended = [r for r, p in positions.items() if p.ended]
    if ended:
        if any(positions[r].ended.startswith("ended with") for r in ended):
            return f"{_names(ended)} ended with an error", "the first error is in that rank's log"
        return f"{_names(ended)} left the loop earlier, as with fewer batches than the others", _TOGETHER
    if gone:
        return f"{_names(gone)} died", "look for the first error in its log, or for a lack of memory"
    unequal = _unequally_frozen(positions)
    if unequal:
        name, ranks = unequal
        more = len(positions[ranks[0]].frozen) - 1
        return (
            f"parameter {name!r}{f' and {more} more' if more else ''}, frozen on {_names(ranks)} only",
            "set requires_grad in the same way on all ranks",
        )
    for entries in (_first_parting(positions), {r: p.entry for r, p in positions.items() if p.waiting}):
        alone = {r: entry for r, entry in entries.items() if entry not in LOOP}
        if alone and (len(set(entries.values())) > 1 or len(alone) < len(positions)):
            return _cause_of_lone_calls(alone)
        idle = [r for r, entry in entries.items() if entry == NO_GRADIENTS]
        if idle and len(idle) < len(entries):
            return f"a loop of forwards without gradients was longer on {_names(idle)}", _GENERATION
    modes = {p.training for p in positions.values()}
    if len(modes) > 1:
        modes_of = [r for r, p in positions.items() if not p.training]
        return (
            f"{_names(modes_of)} evaluates or generates while the others train: a loop of forwards had another "
            f"length there",
            _GENERATION,
        )
    busy = [r for r, p in positions.items() if p.waiting is None]
    if busy:
        return (
            f"{_names(busy)} is slower than the others, stands still, or has left the loop",
            f"if it has left it: {_TOGETHER}; if it is only slow, a longer time-out in init_process_group",
        )
    return _cause_of_counts(own, positions)


def _unequally_frozen(positions: Positions) -> tuple[str, list[int]] | None:
    for name in dict.fromkeys(name for p in positions.values() for name in p.frozen):
        ranks = [r for r, p in positions.items() if name in p.frozen]
        if len(ranks) < len(positions):
            return name, ranks
    return None


def _cause_of_lone_calls(alone: Mapping[int, str]) -> tuple[str, str]:
    ranks, calls = list(alone), sorted({f"{entry}()" for entry in alone.values() if entry})
    if calls == ["close()"]:
        return (
            f"{_names(ranks)} left the loop earlier, as with fewer batches, and closes its engine",
            _TOGETHER,
        )
    what = " and ".join(calls) or "a collective"
    return (
        f"only {_names(ranks)} called {what}, which all ranks must call: it stands under an `if rank == ...`, or "
        f"the loop before it was shorter there",
        "call it on every rank, and choose the rank inside, for what is done with the result",
    )


def _cause_of_counts(own: Position, positions: Positions) -> tuple[str, str]:
    entries = {p.entry for p in positions.values()}
    name = own.waiting[0] if own.waiting is not None else ""
    counts = {
        r: Counter(launch.label for launch in p.groups[name].recent if launch.label)
        for r, p in positions.items()
        if name in p.groups
    }
    times = {
        label: {r: count[label] for r, count in counts.items()}
        for label in dict.fromkeys(label for count in counts.values() for label in count)
    }
    label = max(times, key=lambda label: max(times[label].values()) - min(times[label].values()), default="")
    if label and len(set(times[label].values())) > 1:
        each = ", ".join(f"{n} on {_names(ranks)}" for ranks, n in _by_count(times[label]))
        return (
            f"ranks ran different modules, or one of them more often: of the collectives remembered, those of "
            f"{label} are {each}",
            f"{_SAME_FLOW}. If only the number of forwards differs, {_GENERATION}",
        )
    if len(entries) > 1:
        return "ranks made different numbers of forwards, backwards or steps", _TOGETHER
    return "ranks ran different modules, or the same ones in another order", _SAME_FLOW


def _by_count(times: Mapping[int, int]) -> list[tuple[list[int], int]]:
    groups: dict[int, list[int]] = {}
    for rank, count in times.items():
        groups.setdefault(count, []).append(rank)
    return [(ranks, count) for count, ranks in groups.items()]
