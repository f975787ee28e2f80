"""What the key table is made of: a `Key` per config key, and the `Status` it has in this release."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Key", "Status", "alias", "deprecated", "keys", "no_effect", "not_yet", "refused", "used"]

Tier = Literal["A", "B", "C"]
Row = str | tuple[str, str, Any]
"""A meaning; below an open section, which has no fields, `(meaning, type, default)`."""


_PHRASES = {
    "used": "used by {}",
    "no effect": "no effect here, because {}",
    "not yet": "not yet ({})",
    "refused": "refused, because {}",
    "alias": "another name of {}",
    "deprecated": "old name of {}",
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """What this release does with a key."""

    kind: Literal["used", "no effect", "not yet", "refused", "alias", "deprecated"]
    text: str
    """used: the consumer. no effect, refused: the reason. not yet: the work it waits for. alias: the key."""

    def __str__(self) -> str:
        return _PHRASES[self.kind].format(self.text)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One row of the table."""

    path: str
    """Dotted name. `optimizer.params (SGD|Adam*).name` is a parameter of those optimizers only."""
    tier: Tier
    status: Status
    meaning: str
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, besides the default: no note and no error."""
    type: str | None = None
    """Only below an open section; otherwise the field of the tree knows it, and the default too."""
    default: Any = None


def used(by: str) -> Status:
    return Status(kind="used", text=by)


def no_effect(because: str) -> Status:
    return Status(kind="no effect", text=because)


def not_yet(work: str) -> Status:
    return Status(kind="not yet", text=work)


def refused(because: str) -> Status:
    return Status(kind="refused", text=because)


def alias(of: str) -> Status:
    """Another spelling of the key `of`."""
    return Status(kind="alias", text=of)


def deprecated(of: str) -> Status:
    """An old spelling of the key `of`: it is converted, with a note."""
    return Status(kind="deprecated", text=of)


def keys(
    prefix: str,
    tier: Tier,
    status: Status,
    /,
    *,
    neutral: tuple[Any, ...] = (),
    **rows: Row,
) -> Iterator[Key]:
    """The keys of section `prefix` ("" is the top level) that share a status."""
    for name, row in rows.items():
        meaning, type_, default = (row, None, None) if isinstance(row, str) else row
        yield Key(
            path=f"{prefix}.{name}" if prefix else name,
            tier=tier,
            status=status,
            meaning=meaning,
            neutral=neutral,
            type=type_,
            default=default,
        )
