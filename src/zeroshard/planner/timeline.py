"""A schedule as a picture: buckets down, points across, and what is live at each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroshard.schedule import Schedule, live_elements
from zeroshard.trace import POINTS, Kind

__all__ = ["LEGEND", "timeline"]

LEGEND = "F f forward begins, ends   B b backward   # gathered   ~ gather in flight   . sharded"


def timeline(schedule: Schedule, names: Mapping[int, str], numel: Mapping[int, int]) -> list[str]:
    """One line per bucket and one of live elements, a column per point of the schedule.

    `names` says which buckets are shown, and how; `numel` their elements (padding included).
    """
    state = dict.fromkeys(names, ".")
    rows: dict[int, list[str]] = {bucket: [] for bucket in names}
    live: list[int] = []
    for (kind, bucket), elements in zip(
        schedule.actions, live_elements(schedule.actions, numel), strict=True
    ):
        if kind in POINTS:
            for shown, row in rows.items():
                row.append(kind.value if shown == bucket else state[shown])
            live.append(elements)
        elif bucket in state:
            changes = {Kind.GATHER: "~", Kind.WAIT: "#", Kind.FREE: "."}
            state[bucket] = changes.get(kind, state[bucket])
    width = max((len(name) for name in names.values()), default=0)
    lines = [f"{names[bucket]:>{width}}  {''.join(row)}" for bucket, row in rows.items()]
    return [*lines, f"{'live':>{width}}  {_bars(live)}  peak {max(live, default=0):,} elements"]


def _bars(values: Sequence[int]) -> str:
    """Heights from one eighth to full."""
    top = max(values, default=0)
    steps = " ▁▂▃▄▅▆▇█"
    return "".join(steps[0 if not value else max(1, value * 8 // top)] for value in values)
