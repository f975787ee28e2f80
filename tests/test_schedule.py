from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.errors import ScheduleError
from zeroshard.layout import ModuleSpec, ParameterSpec, plan_layout
from zeroshard.policy import Policy
from zeroshard.schedule import (
    MAX_IN_FLIGHT,
    Schedule,
    add_gather_free,
    add_reduce,
    compile_schedule,
    drop_short_reuse,
    hoist_gathers,
    live_elements,
    verify,
)
from zeroshard.trace import POINTS, Action, Kind, format_actions, parse_actions

NUMEL = {0: 10, 1: 10, 2: 10, 3: 10}


def run(text: str) -> str:
    return format_actions(add_gather_free(parse_actions(text), resident=()))


def test_demand_gathers_at_use_and_frees_after() -> None:
    assert run("0F 0f 0B 0b") == "0GATHER 0WAIT 0F 0f 0FREE 0GATHER 0WAIT 0B 0b 0FREE"


def test_a_recomputed_forward_inside_a_backward_does_not_free() -> None:
    assert run("0B 0F 0f 0b") == "0GATHER 0WAIT 0B 0F 0f 0b 0FREE"


def test_nested_uses_free_once() -> None:
    assert run("0F 0F 0f 0f") == "0GATHER 0WAIT 0F 0F 0f 0f 0FREE"


def test_a_backward_without_end_is_freed_last() -> None:
    assert run("0F 0f 0B 1B 1b").endswith("1b 1FREE 0FREE")


def test_resident_buckets_are_waited_for_once() -> None:
    actions = add_gather_free(parse_actions("0F 0F 0b"), resident=(0,))
    assert format_actions(actions) == "0WAIT 0F 0F 0b"


def test_reuse_within_the_distance_is_kept() -> None:
    demand = add_gather_free(parse_actions("0F 0f 1F 1f 1B 1b 0B 0b"), ())
    near = drop_short_reuse(demand, NUMEL, distance=0, budget=100)
    assert format_actions(near).count("1GATHER") == 1
    assert format_actions(near).count("0GATHER") == 2
    far = drop_short_reuse(demand, NUMEL, distance=20, budget=100)
    assert format_actions(far).count("0GATHER") == 1
    tight = drop_short_reuse(demand, NUMEL, distance=20, budget=10)
    assert max(live_elements(tight, NUMEL)) == 10


def test_worked_example_of_the_module() -> None:
    actions = add_gather_free(parse_actions("0F 0f 1F 1f 1B 1b 0B 0b"), ())
    actions = hoist_gathers(drop_short_reuse(actions, NUMEL, 0, 100), NUMEL, 10, 100)
    actions = add_reduce(actions, {0, 1})
    assert format_actions(actions) == (
        "0GATHER 0WAIT 1GATHER 0F 0f 0FREE 1WAIT 0GATHER 1F 1f 1B 1b 1REDUCE 1FREE 0WAIT 0B 0b 0REDUCE 0FREE"
    )


def test_no_prefetch_leaves_the_demand_schedule() -> None:
    demand = add_gather_free(parse_actions("0F 0f 1F 1f"), ())
    assert hoist_gathers(demand, NUMEL, prefetch=0, budget=100) == demand


def test_a_bucket_larger_than_the_prefetch_size_still_runs_one_ahead() -> None:
    demand = add_gather_free(parse_actions("0F 0f 1F 1f 2F 2f"), ())
    hoisted = format_actions(hoist_gathers(demand, NUMEL, prefetch=1, budget=100))
    assert hoisted == "0GATHER 0WAIT 1GATHER 0F 0f 0FREE 1WAIT 2GATHER 1F 1f 1FREE 2WAIT 2F 2f 2FREE"


def test_steps_put_frees_behind_and_gathers_before() -> None:
    schedule = Schedule.parse("0GATHER 0WAIT 0F 0f 0FREE 1GATHER 1WAIT 1F 1f 1FREE")
    steps = schedule.steps()
    assert [str(step.point) for step in steps] == ["0F", "0f", "1F", "1f"]
    assert format_actions(steps[1].after) == "0FREE"
    assert format_actions(steps[2].before) == "1GATHER 1WAIT"
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F", "computes with bucket 0, which is sharded"),
        ("0GATHER 0F", "computes with bucket 0, which is in flight"),
        ("0GATHER 0WAIT 0F 0f", "still gathered at the end"),
        ("0GATHER 0GATHER", "gathers bucket 0, which is in flight"),
        ("0GATHER 0FREE", "frees bucket 0, which is in flight"),
        ("0FREE", "frees bucket 0, which is sharded"),
        ("0WAIT", "waits for bucket 0, which is sharded"),
        ("0GATHER 0WAIT 1GATHER", "20 elements gathered, budget 15"),
    ],
)
def test_verify_names_the_rule_and_points_at_the_action(text: str, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem) as error:
        verify(parse_actions(text), NUMEL, resident=(), budget=15)
    assert "-->" in str(error.value)


@st.composite
def traces(draw: st.DrawFn) -> tuple[Action, ...]:
    """Forwards with nesting, then backwards in some order, some recomputed, some never ending."""
    points: list[Action] = []
    order = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    for bucket in order:
        inner = draw(st.none() | st.integers(0, 3))
        points.append(Action(Kind.FORWARD, bucket))
        if inner is not None:
            points += [Action(Kind.FORWARD, inner), Action(Kind.END_FORWARD, inner)]
        points.append(Action(Kind.END_FORWARD, bucket))
    for bucket in draw(st.permutations(order)):
        points.append(Action(Kind.BACKWARD, bucket))
        if draw(st.booleans()):
            points += [Action(Kind.FORWARD, bucket), Action(Kind.END_FORWARD, bucket)]
        if draw(st.booleans()):
            points.append(Action(Kind.END_BACKWARD, bucket))
    return tuple(points)


@given(
    traces(),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(0, 80),
    st.integers(0, 25),
)
def test_every_compiled_schedule_is_valid_and_keeps_its_limits(
    trace: tuple[Action, ...], prefetch: int, reuse: int, max_live: int, threshold: int
) -> None:
    specs = [
        ParameterSpec(name=f"b{i}", shape=(16 * (i + 1),), dtype="float32", trainable=i != 2)
        for i in range(4)
    ]
    root = ModuleSpec(
        path="",
        type_name="Root",
        children=tuple(
            ModuleSpec(path=f"m{i}", type_name="M", parameters=(f"b{i}",), is_leaf=True) for i in range(4)
        ),
    )
    policy = Policy.of_stage(
        3, 2, prefetch=prefetch, max_reuse_distance=reuse, max_live=max_live, persistence_threshold=threshold
    )
    layout = plan_layout(root, specs, policy)
    schedule = compile_schedule(trace, layout, policy)  # verifies itself
    assert schedule.points == trace
    numel = {bucket.index: bucket.padded for bucket in layout.buckets}
    demand = add_gather_free(trace, {b.index for b in layout.buckets if b.resident})
    limit = max(max_live, max(live_elements(demand, numel), default=0))
    assert max(live_elements(schedule.actions, numel), default=0) <= limit
    waiting: set[int] = set()
    for kind, bucket in schedule.actions:
        if kind is Kind.GATHER:
            assert len(waiting) <= MAX_IN_FLIGHT
            waiting.add(bucket)
        elif kind is Kind.WAIT:
            waiting.discard(bucket)
    assert [step.point for step in schedule.steps()] == list(trace)
    flat = [a for step in schedule.steps() for a in (*step.before, step.point, *step.after)]
    assert sorted(flat) == sorted(schedule.actions)
    reduced = {action.bucket for action in flat if action.kind is Kind.REDUCE}
    assert all(layout.buckets[bucket].trainable for bucket in reduced)
    assert {a for a in flat if a.kind in POINTS} == set(trace)
