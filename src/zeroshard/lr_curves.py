"""The shapes of learning-rate schedules: pure functions of the step t, which is -1 before the first one."""

from __future__ import annotations

import math

__all__ = [
    "CURVES",
    "cycle_height",
    "decay_intervals",
    "range_test_factor",
    "warmup_cosine_factor",
    "warmup_decay_factor",
    "warmup_factor",
]

CURVES = ("log", "linear")
"""The curves of a warm-up."""


def warmup_factor(t: int, steps: int, curve: str) -> float:
    """From 0 at t <= 0 up to 1 at t = `steps` and ever after; `curve` is log or linear.

    0 steps are no warm-up, and 1 step acts as 2. The log curve reaches 1 a step earlier: it is
    ln(t + 1) / ln(steps).
    """
    if steps == 0:
        return 1.0
    steps = max(2, steps)
    if t < 0:
        return 0.0
    if t >= steps:
        return 1.0
    return math.log(t + 1) / math.log(steps) if curve == "log" else t / steps


def warmup_decay_factor(t: int, steps: int, total: int, curve: str) -> float:
    """`warmup_factor` for t < `steps`; then straight down from 1 to 0 at t = `total`, and 0 ever after."""
    steps = max(2, steps) if steps else 0
    if t < steps or t < 0:
        return warmup_factor(t, steps, curve)
    return max(0.0, (total - t) / max(1, total - steps))


def warmup_cosine_factor(t: int, steps: int, total: int, curve: str, start: float, floor: float) -> float:
    """0 before the first step; `start` to 1 for t < `steps`; half a cosine wave down to `floor` at `total` - 1.

    With 0 steps of warm-up it is 1 before the first step, and the wave begins with it.
    """
    steps = max(2, steps) if steps else 0
    if t < 0:
        return 0.0 if steps else 1.0
    if t < steps:
        return start + (1 - start) * warmup_factor(t, steps, curve)
    done = min(1.0, (t - steps + 1) / max(1, total - steps))
    return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2


def range_test_factor(t: int, interval: int, slope: float, staircase: bool) -> float:
    """1 at t = -1, and `slope` more every `interval` steps, evenly or all at once (arXiv 1506.01186)."""
    passed = (t + 1) // interval if staircase else (t + 1) / interval
    return 1 + slope * passed


def cycle_height(t: int, first: int, second: int, first_stairs: int, second_stairs: int) -> float:
    """Where in its cycle OneCycle is: 0 at t = -1, 1 after `first` steps, 0 after `second` more and ever after.

    With n stairs in a half, it takes the values 0, 1/n, ... (n-1)/n, and 1 at the peak alone (arXiv 1803.09820).
    """
    if t >= first + second:
        return 0.0
    place = (t + 1) % (first + second)
    if place <= first:
        climbed, half, stairs = place, first, first_stairs
    else:
        climbed, half, stairs = first + second - place, second, second_stairs
    return climbed * stairs // half / stairs if stairs else climbed / half


def decay_intervals(t: int, cycle: int, interval: int) -> float:
    """Intervals passed since the end of a cycle of `cycle` steps; 0 in the cycle, and for an interval of 0."""
    return max(0, t - cycle + 1) / interval if interval else 0.0
