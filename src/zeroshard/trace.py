"""What a step did: points in the order the hooks reported them, and the paths seen so far.

A point is one of four moments of one bucket: `F` before a forward that uses it, `f` after, `B` before the
backward of that forward, `b` when that has nothing left to do. All four are the same on all ranks that run the same
modules, whatever their data; which gradients come is no point. A path is the points between the start of an
outermost forward and the start of the next one (or the step): a micro-batch, or an evaluation forward.
"""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["POINTS", "Action", "Kind", "digest", "format_actions", "parse_actions"]


class Kind(str, enum.Enum):
    """Compute points come from the trace; the rest is what a schedule adds."""

    FORWARD = "F"
    END_FORWARD = "f"
    BACKWARD = "B"
    END_BACKWARD = "b"
    GATHER = "GATHER"
    """Launch the all-gather of a bucket."""
    WAIT = "WAIT"
    """The gathered bucket is needed from here on."""
    FREE = "FREE"
    """Give the gathered memory back."""
    REDUCE = "REDUCE"
    """The bucket's gradient may be reduced."""

    def __str__(self) -> str:
        return self.value


POINTS = frozenset({Kind.FORWARD, Kind.END_FORWARD, Kind.BACKWARD, Kind.END_BACKWARD})


class Action(NamedTuple):
    """`0GATHER`: do this to bucket 0. `0F`: bucket 0 is at this point."""

    kind: Kind
    bucket: int

    def __str__(self) -> str:
        return f"{self.bucket}{self.kind.value}"


def format_actions(actions: Iterable[Action]) -> str:
    """The text form, e.g. `0GATHER 0WAIT 0F 0f 0FREE`; `parse_actions` is its inverse."""
    return " ".join(map(str, actions))


def parse_actions(text: str) -> tuple[Action, ...]:
    """Read the text form. Raises ValueError that names the word that is not an action."""
    actions = []
    for word in text.split():
        number = re.match(r"\d*", word).group()  # type: ignore[union-attr]  # matches any word
        try:
            actions.append(Action(Kind(word[len(number) :]), int(number)))
        except ValueError:
            raise ValueError(
                f"{word!r} is not an action; expected a bucket number and one of "
                f"{', '.join(kind.value for kind in Kind)}"
            ) from None
    return tuple(actions)


def digest(actions: Iterable[Action], seed: int = 0) -> int:
    """A 32-bit checksum of a sequence; `digest(b, digest(a))` is that of a followed by b."""
    value = seed
    for action in actions:
        value = zlib.crc32(f"{action} ".encode(), value)
    return value
