"""From the size and the time of a collective to its bandwidth, as nccl-tests has it.

    algorithm bandwidth    S / t
    bus bandwidth          S / t * share(n)

S is the bytes of the longest tensor (of an all-gather the gathered one, of a reduce-scatter the one to be reduced),
n the number of ranks, and the share is the part of S that each rank must send at least:

    all-reduce                                2 * (n-1)/n
    all-gather, reduce-scatter, all-to-all    (n-1)/n
    broadcast, point-to-point                 1

The bus bandwidth can be compared with what the links carry, whatever n is; the algorithm bandwidth says how long a
collective takes. Source: nccl-tests, doc/PERFORMANCE.md. In a group of one rank nothing is sent: 0.

Example: an all-reduce of 100 MB on 4 ranks in 10 ms is 10 GB/s, and 15 GB/s on the bus.
"""

from __future__ import annotations

from fractions import Fraction

__all__ = ["OPERATIONS", "bandwidth", "sent_share"]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point")


def sent_share(operation: str, ranks: int) -> Fraction:
    """What each rank sends, as a part of the bytes of the longest tensor."""
    if ranks < 2:
        return Fraction(0)
    if operation in ("all_reduce", "sum_to_host"):
        return Fraction(2 * (ranks - 1), ranks)
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return Fraction(ranks - 1, ranks)
    if operation in ("broadcast", "point_to_point"):
        return Fraction(1)
    raise ValueError(f"{operation!r} is not one of sum_to_host, {', '.join(OPERATIONS)}")


def bandwidth(operation: str, nbytes: float, seconds: float, ranks: int) -> tuple[float, float]:
    """(algorithm, bus) bandwidth in bytes per second; 0 where no time was measured."""
    algorithm = nbytes / seconds if seconds > 0 else 0.0
    return algorithm, algorithm * float(sent_share(operation, ranks))
