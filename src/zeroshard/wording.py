"""How sizes, lists and other people's errors are put into words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

__all__ = ["first_few", "in_one_line", "size_in_words"]


def first_few(names: Collection[str], most: int) -> str:
    """`a, b, c and 4 more`: at most so many of them."""
    shown = ", ".join(islice(names, most))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def in_one_line(error: BaseException) -> str:
    """The type and text of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def size_in_words(nbytes: int, units: Sequence[str] = ("KiB", "MiB", "GiB", "TiB")) -> str:
    """12.5 MiB; the units are powers of 1024, whatever they are called."""
    value, unit = float(nbytes), "B"
    for larger in units:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"
