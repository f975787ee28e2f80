from __future__ import annotations

from zeroshard.planner.timeline import timeline
from zeroshard.schedule import Schedule


def test_a_schedule_as_a_picture() -> None:
    schedule = Schedule.parse("0GATHER 0WAIT 1GATHER 0F 0f 0FREE 1WAIT 1F 1f 1FREE")
    lines = timeline(schedule, {0: "embed", 1: "head"}, {0: 10, 1: 20})
    assert lines == [
        "embed  Ff..",
        " head  ~~Ff",
        " live  ██▅▅  peak 30 elements",
    ]


def test_only_the_named_buckets_are_shown() -> None:
    schedule = Schedule.parse("0GATHER 0WAIT 0F 0f 0FREE 1WAIT 1F")
    assert timeline(schedule, {0: "a"}, {0: 4, 1: 4})[0] == "a  Ff."
