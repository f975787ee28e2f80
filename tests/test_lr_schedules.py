"""The five schedules of the config against reference values; groups; resuming; what is refused."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from zeroshard.config import parse
from zeroshard.config.keys import parameter_keys
from zeroshard.config.rules import SCHEDULE_TYPES
from zeroshard.errors import ConfigError, StateError
from zeroshard.lr_curves import (
    cycle_height,
    decay_intervals,
    range_test_factor,
    warmup_cosine_factor,
    warmup_decay_factor,
    warmup_factor,
)
from zeroshard.lr_schedules import (
    MOMENTUM_LIMIT,
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_schedule,
)

WARMUP: dict[str, Any] = {"warmup_max_lr": 0.1, "warmup_num_steps": 4}
LINEAR: dict[str, Any] = {**WARMUP, "warmup_type": "linear"}
CYCLE: dict[str, Any] = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4}
VECTORS: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "range": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2},
        [0.1, 0.15, 0.2, 0.25, 0.3, 0.35],
    ),
    "range, stairs": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
        [0.1, 0.1, 0.2, 0.2, 0.3, 0.3],
    ),
    "warm-up, log": ("WarmupLR", WARMUP, [0, 0, 0.05, 0.07924813, 0.1, 0.1]),
    "warm-up, linear": ("WarmupLR", LINEAR, [0, 0, 0.025, 0.05, 0.075, 0.1, 0.1]),
    "warm-up, decay": (
        "WarmupDecayLR",
        {**LINEAR, "total_num_steps": 10},
        [0, 0, 0.025, 0.05, 0.075, 0.1, 0.08333333, 0.06666667, 0.05, 0.03333333, 0.01666667, 0, 0],
    ),
    "warm-up, cosine": (
        "WarmupCosineLR",
        {"total_num_steps": 10, "warmup_num_steps": 4, "cos_min_ratio": 0.1, "warmup_type": "linear"},
        [0, 0, 0.025, 0.05, 0.075, 0.09397114, 0.0775, 0.055, 0.0325, 0.01602886, 0.01, 0.01],
    ),
    "cycle": (
        "OneCycle",
        {**CYCLE, "decay_step_size": 2, "decay_lr_rate": 0.5},
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.08, 0.06666667, 0.05714286, 0.05],
    ),
}
FIVE: dict[str, dict[str, Any]] = {name: params for name, params, _ in VECTORS.values()}


def adam(*rates: Any, cls: type[Optimizer] = Adam, **options: Any) -> Optimizer:
    """An optimizer with a group per rate."""
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates]
    return cls(groups, **options)  # type: ignore[arg-type]


def rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def build(name: str, optimizer: Optimizer, **params: Any) -> Any:
    return build_schedule(name, params, optimizer)


@pytest.mark.parametrize("case", VECTORS)
def test_reference_values(case: str) -> None:
    name, params, expected = VECTORS[case]
    optimizer = adam(0.1)
    schedule = build(name, optimizer, **params)
    seen = rates_of(optimizer)
    while len(seen) < len(expected):
        schedule.step()
        assert schedule.get_lr() == schedule.get_last_lr() == rates_of(optimizer)
        seen += rates_of(optimizer)
    assert seen == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("name", SCHEDULES)
def test_constructors_table_and_rules_agree(name: str) -> None:
    """The names and the defaults that are listed for users are those of the classes."""
    assert set(SCHEDULES) == set(SCHEDULE_TYPES)
    taken = dict(inspect.signature(SCHEDULES[name]).parameters)
    assert next(iter(taken)) == "optimizer"
    assert taken["last_batch_iteration"].default == -1
    listed = {key: row.default for key, row in parameter_keys("scheduler", name).items() if "(" in row.path}
    for key in ("optimizer", "last_batch_iteration"):
        del taken[key]
    defaults = {key: None if p.default is p.empty else p.default for key, p in taken.items()}
    assert defaults == listed


# --- groups


@pytest.mark.parametrize("name", FIVE)
def test_groups_keep_their_proportion(name: str) -> None:
    alone, several = adam(0.1), adam(0.01, 0.1, 0.0)
    one, three = build(name, alone, **FIVE[name]), build(name, several, **FIVE[name])
    for _ in range(14):
        (rate,) = rates_of(alone)
        assert rates_of(several) == pytest.approx([rate * 0.1, rate, 0.0], abs=1e-12)
        one.step()
        three.step()


def test_a_single_number_is_the_rate_of_the_largest_group() -> None:
    optimizer = adam(1e-3, 1e-4)
    schedule = WarmupLR(optimizer, warmup_min_lr=1e-4, warmup_max_lr=2e-3)
    assert rates_of(optimizer) == pytest.approx([1e-4, 1e-5])
    schedule.step(1000)
    assert rates_of(optimizer) == pytest.approx([2e-3, 2e-4])


@pytest.mark.parametrize("base", [0.0, 0.03])
def test_equal_groups_all_have_the_number(base: float) -> None:
    optimizer = adam(base, base)
    LRRangeTest(optimizer, 0.1).step(1999)
    assert rates_of(optimizer) == [0.2, 0.2]


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR"])
def test_without_a_peak_the_optimizer_keeps_its_own_rates(name: str) -> None:
    optimizer = adam(5e-7, 3e-5)
    extra = {"total_num_steps": 20} if name == "WarmupDecayLR" else {}
    schedule = build(name, optimizer, warmup_num_steps=10, **extra)
    assert rates_of(optimizer) == [0, 0]
    schedule.step(10)
    assert rates_of(optimizer) == pytest.approx([5e-7, 3e-5], rel=1e-12)
    assert schedule.base_lrs == [5e-7, 3e-5]


def test_lists_are_per_group() -> None:
    optimizer = adam(1.0, 0.1)
    schedule = WarmupLR(optimizer, warmup_min_lr=[0.01, 0.02], warmup_max_lr=(0.5, 0.7))
    assert rates_of(optimizer) == [0.01, 0.02]
    schedule.step(5000)
    assert rates_of(optimizer) == pytest.approx([0.5, 0.7])


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cycle_max_lr = \[.*it has 3 and the optimizer has 2 groups"):
        OneCycle(adam(0.1, 0.2), cycle_min_lr=0.1, cycle_max_lr=[0.1, 0.2, 0.3])
    with pytest.raises(ConfigError, match=r"warmup_max_lr\[1\] = \"x\": must be a number"):
        WarmupLR(adam(0.1, 0.2), warmup_max_lr=[0.1, "x"])


def test_groups_that_are_added_later_are_not_overlooked() -> None:
    optimizer = adam(0.1)
    schedule = WarmupLR(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(StateError, match="built for 1 parameter groups and the optimizer now has 2"):
        schedule.step()


def test_tensor_rates_are_changed_in_place() -> None:
    shared = torch.tensor(0.5)
    parameters = [{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(2)]
    optimizer = AdamW(parameters, lr=shared, capturable=True, foreach=False)
    schedule = WarmupLR(optimizer, warmup_max_lr=[0.25, 0.75])
    tensors = [group["lr"] for group in optimizer.param_groups]
    assert tensors[0] is shared
    schedule.step(1000)
    assert rates_of(optimizer) == [0.25, 0.75]
    assert [group["lr"] for group in optimizer.param_groups] == tensors
    assert all(group["lr"] is t for group, t in zip(optimizer.param_groups, tensors, strict=True))
    assert schedule.base_lrs == [0.5, 0.5]


# --- resuming


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("name", FIVE)
def test_a_saved_schedule_goes_on(name: str, restored: bool) -> None:
    first, second = adam(0.1, 0.02), adam(0.1, 0.02)
    going = build(name, first, **FIVE[name])
    for _ in range(5):
        going.step()
    if restored:  # before the schedule is built: its scheduled rates are not the base
        second.load_state_dict(first.state_dict())
    again = build(name, second, **FIVE[name])
    assert going.state_dict() == {"last_batch_iteration": 4}
    again.load_state_dict(going.state_dict())
    for _ in range(8):
        assert rates_of(first) == rates_of(second)
        assert first.param_groups[1]["betas"] == second.param_groups[1]["betas"]
        going.step()
        again.step()


def test_a_schedule_that_continues_writes_nothing_before_its_step() -> None:
    optimizer = adam(0.1)
    schedule = build("WarmupLR", optimizer, **LINEAR, last_batch_iteration=1)
    assert rates_of(optimizer) == schedule.get_last_lr() == [0.1]
    schedule.step()
    assert rates_of(optimizer) == pytest.approx([0.05])


def test_a_second_schedule_does_not_start_from_the_rates_of_the_first() -> None:
    optimizer = adam(0.1)
    WarmupCosineLR(optimizer, 10)
    assert rates_of(optimizer) == [0]
    assert WarmupCosineLR(optimizer, 10).base_lrs == [0.1]
    assert torch.optim.lr_scheduler.StepLR(optimizer, 1).base_lrs == [0.1]


def test_step_can_be_told_where_it_is() -> None:
    optimizer = adam(0.1)
    schedule = build("WarmupLR", optimizer, **LINEAR)
    schedule.step(3)
    assert rates_of(optimizer) == pytest.approx([0.075])
    schedule.step()
    assert schedule.last_batch_iteration == 4


# --- momentum


def test_momentum_goes_against_the_rate() -> None:
    optimizer = adam(0.1)
    schedule = build("OneCycle", optimizer, **CYCLE, decay_step_size=1, decay_mom_rate=0.05)
    seen = [optimizer.param_groups[0]["betas"]]
    for _ in range(13):
        schedule.step()
        seen.append(optimizer.param_groups[0]["betas"])
    first = [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.945, 0.99, *[MOMENTUM_LIMIT] * 3]
    assert [beta for beta, _ in seen] == pytest.approx(first)
    assert {beta for _, beta in seen} == {0.99}
    assert MOMENTUM_LIMIT < 1


def test_momentum_of_sgd_and_per_group() -> None:
    optimizer = adam(0.1, 0.1, cls=SGD, momentum=0.5)
    schedule = build("OneCycle", optimizer, **CYCLE, cycle_min_mom=[0.1, 0.2], cycle_max_mom=0.7)
    for t, expected in ((3, [0.1, 0.2]), (7, [0.7, 0.7])):
        schedule.step(t)
        assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx(expected)
    assert "betas" not in optimizer.param_groups[0]


def test_momentum_is_left_alone_when_told() -> None:
    optimizer = adam(0.1, betas=(0.7, 0.8))
    build("OneCycle", optimizer, **CYCLE, cycle_momentum=False).step(3)
    assert optimizer.param_groups[0]["betas"] == (0.7, 0.8)


def test_an_optimizer_without_momentum_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = adam(0.1, 0.1, cls=Adagrad)
    schedule = build("OneCycle", optimizer, **CYCLE)
    for _ in range(3):
        schedule.step()
    (record,) = caplog.records
    assert "Adagrad has neither betas nor momentum" in record.getMessage()
    assert schedule.cycle_momentum is False
    assert rates_of(optimizer) == pytest.approx([0.4, 0.4])
    assert not {"betas", "momentum"} & set(optimizer.param_groups[0])


# --- what is given and refused


def test_wrapped_optimizers_are_unwrapped() -> None:
    optimizer = adam(0.1)
    assert WarmupLR(SimpleNamespace(optimizer=optimizer)).optimizer is optimizer
    wrapped = SimpleNamespace(optimizer=optimizer)
    torch_schedule = build_schedule("ExponentialLR", {"gamma": 0.5}, wrapped)
    assert torch_schedule.optimizer is optimizer


@pytest.mark.parametrize("given", [None, nn.Linear(1, 1), SimpleNamespace(optimizer=3)])
def test_anything_else_is_named(given: Any) -> None:
    with pytest.raises(TypeError, match=rf"was given {type(given).__module__}\.{type(given).__name__};"):
        WarmupLR(given)
    with pytest.raises(TypeError, match="pass the optimizer"):
        build_schedule("StepLR", {"step_size": 1}, given)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("WarmupLR", {"warmup_num_steps": -1}, ["warmup_num_steps = -1: must be at least 0"]),
        ("WarmupLR", {"warmup_num_steps": 2.5}, ["warmup_num_steps = 2.5: must be a whole number"]),
        ("WarmupLR", {"warmup_num_steps": True}, ["warmup_num_steps = true: must be a number"]),
        ("WarmupLR", {"warmup_max_lr": -0.1}, ["warmup_max_lr = -0.1: must be at least 0"]),
        ("WarmupLR", {"warmup_max_lr": math.nan}, ["warmup_max_lr", "finite"]),
        ("WarmupLR", {"warmup_type": "cubic"}, ['warmup_type = "cubic": must be one of log and linear']),
        ("WarmupLR", {"last_batch_iteration": -2}, ["last_batch_iteration = -2"]),
        ("WarmupLR", {"warmup_steps": 5}, ["warmup_steps", "did you mean warmup_num_steps?", "warmup_type"]),
        (
            "WarmupDecayLR",
            {},
            ["total_num_steps: WarmupDecayLR needs it", "takes total_num_steps, warmup_min"],
        ),
        ("WarmupDecayLR", {"total_num_steps": None}, ["total_num_steps = null"]),
        ("WarmupCosineLR", {"warmup_max_lr": 1}, ["total_num_steps", "warmup_max_lr: WarmupCosineLR has no"]),
        ("WarmupCosineLR", {"total_num_steps": 0}, ["total_num_steps = 0"]),
        ("OneCycle", {"cycle_min_lr": 0.1}, ["cycle_max_lr: OneCycle needs it"]),
        ("OneCycle", {**CYCLE, "cycle_second_step_size": -1}, ["cycle_second_step_size = -1"]),
        ("OneCycle", {**CYCLE, "cycle_second_stair_count": 0.5}, ["cycle_second_stair_count = 0.5"]),
        ("OneCycle", {**CYCLE, "cycle_max_mom": 1.0}, ["cycle_max_mom = 1.0: must be at most 0.9999"]),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, ["lr_range_test_step_size = 0"]),
        (
            "LRRangeTest",
            {"lr_range_test_staircase": 1},
            ["lr_range_test_staircase = 1: must be true or false"],
        ),
        ("LRRangeTest", {"optimizer": 1}, ["optimizer: LRRangeTest has no such parameter"]),
        ("StepLR", {"gamma": 0.1}, ["step_size: torch.optim.lr_scheduler.StepLR needs it", "gamma"]),
        ("StepLR", {"step_size": 1, "gama": 2}, ["scheduler.params.gama", "did you mean gamma?"]),
        ("OneCycleLR", {"max_lr": 0.1}, ["refused by torch.optim.lr_scheduler.OneCycleLR", "total_steps"]),
        ("warmuplr", {}, ['scheduler.type = "warmuplr"', "did you mean WarmupLR?"]),
        ("CosineAnealingLR", {}, ["did you mean CosineAnnealingLR?"]),
        ("xyzzy", {}, ["choose LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR"]),
        ("LRScheduler", {}, ["neither a built-in name nor"]),
        ("LambdaLR", {"lr_lambda": 1}, ["functions", "pass lr_scheduler=lambda optimizer: LambdaLR(...)"]),
    ],
)
def test_refused(name: str, params: dict[str, Any], words: list[str]) -> None:
    optimizer = adam(0.1)
    with pytest.raises(ConfigError) as caught:
        build_schedule(name, params, optimizer)
    assert "scheduler." in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert rates_of(optimizer) == [0.1]


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_total_below_the_warm_up_is_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build(name, adam(0.1), total_num_steps=10, warmup_num_steps=10)
    assert caplog.records == []
    build(name, adam(0.1), total_num_steps=9, warmup_num_steps=10)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("zeroshard", logging.WARNING)
    assert "total_num_steps = 9 is less than warmup_num_steps = 10" in record.getMessage()


def test_torch_schedules_by_name() -> None:
    optimizer = adam(0.1, 0.01)
    schedule = build_schedule("MultiStepLR", {"milestones": [1], "gamma": 0.5}, optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.MultiStepLR)
    optimizer.step()
    schedule.step()
    assert rates_of(optimizer) == pytest.approx([0.05, 0.005])


def test_from_a_parsed_config() -> None:
    section = parse(
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.2, 0.4], "warmup_num_steps": 4.0}}}
    ).scheduler
    optimizer = adam(0.1, 0.1)
    assert section.type is not None
    build_schedule(section.type, section.params, optimizer).step(4)
    assert rates_of(optimizer) == [0.2, 0.4]


@pytest.mark.parametrize("name", FIVE)
def test_repr_shows_the_settings_where_it_is_and_the_rates(name: str) -> None:
    schedule = build(name, adam(0.1, 0.05), **FIVE[name])
    schedule.step(4)
    text = repr(schedule)
    assert text.startswith(f"{name}(")
    assert "last_batch_iteration=4), lr " in text
    assert all(f"{key}=" in text for key in FIVE[name])


def test_repr_in_full() -> None:
    schedule = build("WarmupLR", adam(0.2, 0.1), **LINEAR)
    schedule.step(3)
    assert repr(schedule) == (
        "WarmupLR(warmup_min_lr=[0.0, 0.0], warmup_max_lr=[0.1, 0.05], warmup_num_steps=4, "
        "warmup_type='linear', last_batch_iteration=3), lr 0.075, 0.0375"
    )
    assert isinstance(schedule, Schedule)


# --- the curves

counts = st.integers(1, 60)
curves = st.sampled_from(["log", "linear"])
ratios = st.floats(0, 1)


@given(counts, curves)
def test_warm_up_rises_from_0_to_1(steps: int, curve: str) -> None:
    values = [warmup_factor(t, steps, curve) for t in range(-1, steps + 5)]
    assert values == sorted(values)
    assert values[:2] == [0, 0]
    assert values[-4:] == [1] * 4


@given(counts, counts, curves)
def test_decay_rises_then_falls_to_0(steps: int, total: int, curve: str) -> None:
    values = [warmup_decay_factor(t, steps, total, curve) for t in range(-1, steps + total + 3)]
    peak = max(2, steps) + 1  # the index of t = steps
    assert values[:peak] == sorted(values[:peak])
    assert values[peak:] == sorted(values[peak:], reverse=True)
    assert all(0 <= value <= 1 for value in values)
    assert values[-1] == 0
    if total > max(2, steps):
        assert values[peak] == 1
        assert values[total] > 0  # t = total - 1


@given(counts, counts, curves, ratios, ratios)
def test_cosine_stays_above_its_floor(steps: int, total: int, curve: str, start: float, floor: float) -> None:
    steps = max(2, steps)
    values = [warmup_cosine_factor(t, steps, total, curve, start, floor) for t in range(steps + total + 3)]
    warm, cool = values[:steps], values[steps:]
    assert all(start <= value <= 1 + 1e-12 for value in warm)
    assert warm[0] == pytest.approx(start)
    assert all(floor <= value <= 1 + 1e-12 for value in cool)
    assert all(a >= b for a, b in itertools.pairwise(cool))
    assert cool[-1] == floor


@given(ratios, ratios, counts, curves, st.integers(-1, 80))
def test_rates_stay_between_low_and_high(a: float, b: float, steps: int, curve: str, t: int) -> None:
    low, high = sorted((a, b))
    schedule = WarmupLR(adam(0.1), low, high, steps, curve)
    schedule.step(t)
    assert low - 1e-12 <= schedule.get_lr()[0] <= high + 1e-12


@given(counts, st.floats(0, 3), st.booleans(), st.integers(-1, 200))
def test_range_test_stairs_are_below_the_slope(interval: int, slope: float, stairs: bool, t: int) -> None:
    even, flat = (range_test_factor(t, interval, slope, stairs) for stairs in (False, True))
    assert even - slope - 1e-9 <= flat <= even + 1e-9
    if (t + 1) % interval == 0:
        assert flat == pytest.approx(even)


@given(counts, counts, st.integers(0, 7), st.integers(0, 7))
def test_a_cycle_goes_up_and_down(first: int, second: int, up: int, down: int) -> None:
    heights = [cycle_height(t, first, second, up, down) for t in range(-1, first + second + 5)]
    assert heights[0] == 0
    assert heights[first] == 1
    assert heights[: first + 1] == sorted(heights[: first + 1])
    assert heights[first:] == sorted(heights[first:], reverse=True)
    assert set(heights[first + second :]) == {0}
    if 0 < up <= first:
        assert set(heights[:first]) == {n / up for n in range(up)}
    if 0 < down <= second:
        assert set(heights[first + 1 : first + second + 1]) == {n / down for n in range(down)}


@given(counts, counts, st.integers(0, 9))
def test_decay_starts_after_the_cycle(cycle: int, after: int, interval: int) -> None:
    assert [decay_intervals(t, cycle, interval) for t in (-1, cycle - 1)] == [0, 0]
    expected = after / interval if interval else 0
    assert decay_intervals(cycle - 1 + after, cycle, interval) == pytest.approx(expected)


def test_a_cycle_with_stairs() -> None:
    optimizer = adam(0.1)
    schedule = build("OneCycle", optimizer, **CYCLE, cycle_first_stair_count=2)
    seen = rates_of(optimizer)
    for _ in range(9):
        schedule.step()
        seen += rates_of(optimizer)
    assert seen == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.3, 0.1, 0.1, 0.1])


def test_decay_of_a_schedule_ends_at_its_low_rate() -> None:
    optimizer = adam(0.1)
    WarmupDecayLR(optimizer, 20, warmup_min_lr=0.01, warmup_num_steps=5).step(20)
    assert rates_of(optimizer) == [0.01]


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_no_warm_up_is_the_whole_rate_from_the_first_step(name: str) -> None:
    """What "auto" comes to where nobody asked for a warm-up."""
    optimizer = adam(0.1)
    extra = {} if name == "WarmupLR" else {"total_num_steps": 4}
    schedule = build(name, optimizer, warmup_num_steps=0, **extra)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(5):
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(0.1)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx({"WarmupLR": 0.1, "WarmupDecayLR": 0.0, "WarmupCosineLR": 1e-5}[name])
