"""Whether all ranks have the same number, read off a sum: one collective for many questions.

A rank contributes x and x squared for each question. W ranks agree exactly when W * sum(x^2) = (sum x)^2, and
for numbers of 16 bits both sides are exact in float64 (up to 2^10 ranks). A checksum of 16 bits misses a
difference once in 65536 times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["ballot", "unanimous"]


def ballot(checksums: Iterable[int]) -> list[float]:
    """What a rank adds to the sum: two numbers per checksum, of which the low 16 bits count."""
    return [float(power) for value in checksums for power in (value & 0xFFFF, (value & 0xFFFF) ** 2)]


def unanimous(sums: Sequence[float], ranks: int) -> list[bool]:
    """For each checksum of the ballots that were summed: all `ranks` gave the same."""
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return [ranks * squares == total * total for total, squares in pairs]
