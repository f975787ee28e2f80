"""Which parameter is which entry of an optimizer that was saved without names (stage 0).

Such an optimizer knows its parameters by position: group by group, each in the order in which the user passed them.
The names come in the order of the model. Parameters of a group are nearly always in that order too, so the question
is which names go to which group, and which to none (frozen). A name can only go to the next place of a group, and
only if it fits there by its shape or its values. All ways are followed at once, name by name; an answer is given
when exactly one leads to the end.

    names a(2,3) b(3) c(3,2) d(3), groups [(2,3), (3,2)] and [(3), (3)]: a and c, b and d
    names a(3) b(3), groups [(3)] and [(3)]: a and b, or b and a: no answer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Group", "assign"]

WAYS = 20_000
"""Followed at a time; with more there is no single answer in sight."""


@dataclass(frozen=True)
class Group:
    """A parameter group with `size` places, or elements where it is one flat tensor."""

    size: int
    fits: Callable[[int, str], bool]
    """Whether the name can be at this place."""


def assign(
    names: Sequence[str], groups: Sequence[Group], size_of: Callable[[str], int]
) -> list[list[str]] | None:
    """The names of each group in order. None when there is more than one way.

    `size_of`: places or elements that a name takes. Raises LookupError when there is no way.
    """
    total = sum(group.size for group in groups)
    left = sum(map(size_of, names))
    layer: dict[tuple[int, ...], int] = {(0,) * len(groups): 1}
    history: list[dict[tuple[int, ...], tuple[tuple[int, ...], int | None]]] = []
    """For each name: of each way so far, in the end states, the one before and the group that took the name."""
    for name in names:
        size = size_of(name)
        left -= size
        following: dict[tuple[int, ...], int] = {}
        origin: dict[tuple[int, ...], tuple[tuple[int, ...], int | None]] = {}
        for state, ways in layer.items():
            for after, taker in _moves(state, name, size, groups):
                if total - sum(after) <= left:
                    following[after] = min(2, following.get(after, 0) + ways)
                    origin[after] = state, taker
        if len(following) > WAYS:
            return None
        layer = following
        history.append(origin)
    end = tuple(group.size for group in groups)
    if end not in layer:
        raise LookupError("no order of the parameters fits")
    return _trace(end, names, history) if layer[end] == 1 else None


def _moves(
    state: tuple[int, ...], name: str, size: int, groups: Sequence[Group]
) -> list[tuple[tuple[int, ...], int | None]]:
    moves: list[tuple[tuple[int, ...], int | None]] = [(state, None)]
    for index, group in enumerate(groups):
        at = state[index]
        if size and at + size <= group.size and group.fits(at, name):
            moves.append(((*state[:index], at + size, *state[index + 1 :]), index))
    return moves


def _trace(
    end: tuple[int, ...],
    names: Sequence[str],
    history: Sequence[dict[tuple[int, ...], tuple[tuple[int, ...], int | None]]],
) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in end]
    state = end
    for name, origin in zip(reversed(names), reversed(history), strict=True):
        state, taker = origin[state]
        if taker is not None:
            found[taker].insert(0, name)
    return found
