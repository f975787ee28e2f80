"""The batch keys: all seven combinations, and suggestions that are themselves valid."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zeroshard.config import BatchPlan, resolve_batch
from zeroshard.config.batch import MICRO, STEPS, TOTAL, nearest_batches
from zeroshard.errors import ConfigError

ORIGIN = "WORLD_SIZE in the environment"
small = st.integers(1, 200)
maybe = st.none() | small


def plan(total: int | None, micro: int | None, gas: int | None, world: int) -> BatchPlan:
    return resolve_batch(total, micro, gas, world, ORIGIN, source="file ds.json")


@pytest.mark.parametrize(
    ("given_", "expected", "derived"),
    [
        ((32, 4, 4), (32, 4, 4), ()),
        ((32, 4, None), (32, 4, 4), (STEPS,)),
        ((32, None, 4), (32, 4, 4), (MICRO,)),
        ((None, 4, 4), (32, 4, 4), (TOTAL,)),
        ((32, None, None), (32, 16, 1), (MICRO, STEPS)),
        ((None, 4, None), (8, 4, 1), (TOTAL, STEPS)),
    ],
)
def test_combinations_on_two_ranks(
    given_: tuple[int | None, ...], expected: tuple[int, int, int], derived: tuple[str, ...]
) -> None:
    result = plan(*given_, 2)  # type: ignore[arg-type]
    assert (result.train_batch_size, result.micro_batch_size, result.accumulation_steps) == expected
    assert result.derived == derived
    assert result.world == 2


@pytest.mark.parametrize("gas", [None, 4])
def test_too_few_keys(gas: int | None) -> None:
    with pytest.raises(ConfigError, match=r"file ds\.json: neither train_batch_size nor train_micro_batch"):
        plan(None, None, gas, 2)
    unset = resolve_batch(None, None, gas, 2, ORIGIN, allow_unset=True)
    assert (unset.train_batch_size, unset.micro_batch_size, unset.accumulation_steps) == (
        None,
        None,
        gas or 1,
    )
    assert unset.derived == (() if gas else (STEPS,))


def test_inconsistent_values_are_all_named_with_their_origin() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(16, 4, 2, 1)
    message = str(caught.value)
    for part in (
        "train_batch_size = 16 (from file ds.json)",
        "train_micro_batch_size_per_gpu = 4 (from file ds.json)",
        "gradient_accumulation_steps = 2 (from file ds.json)",
        "world size = 1 (from WORLD_SIZE in the environment)",
        "4 * 2 * 1 = 8, not 16",
        "set train_batch_size to 8 (4 * 2 * 1 = 8)",
        "set gradient_accumulation_steps to 4 (4 * 4 * 1 = 16)",
        "start 2 ranks",
    ):
        assert part in message


def test_derived_value_is_said_to_be_derived() -> None:
    with pytest.raises(
        ConfigError, match=r"steps = not given \(to be derived\)[\s\S]*30 cannot be divided by 4 \* 2 = 8"
    ):
        plan(30, 4, None, 2)


@pytest.mark.parametrize("values", [(0, None, None, 1), (8, -1, None, 1), (8, 1, 0, 1), (8, None, None, 0)])
def test_values_below_one(values: tuple[int, None, None, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        plan(*values)


@given(total=maybe, micro=maybe, gas=maybe, world=st.integers(1, 16))
def test_a_result_keeps_what_was_given_and_the_product_rule(
    total: int | None, micro: int | None, gas: int | None, world: int
) -> None:
    assume(total is not None or micro is not None)
    try:
        result = plan(total, micro, gas, world)
    except ConfigError:
        assert total is not None
        unit = (micro or 1) * (gas or 1) * world
        assert total % unit != 0 or (micro and gas and total != unit), "refused although it fits"
        return
    assert result.train_batch_size == result.micro_batch_size * result.accumulation_steps * world  # type: ignore[operator]
    values = (result.train_batch_size, result.micro_batch_size, result.accumulation_steps)
    for name, asked, value in zip((TOTAL, MICRO, STEPS), (total, micro, gas), values, strict=True):
        assert value is not None
        assert value >= 1
        assert asked in (None, value)
        assert (asked is None) == (name in result.derived)


@given(total=small, micro=maybe, gas=maybe, world=st.integers(1, 16))
def test_suggestions_are_valid_and_the_first_is_nearest(
    total: int, micro: int | None, gas: int | None, world: int
) -> None:
    choices = nearest_batches(total, micro, gas, world)
    for choice in choices:
        plan(*choice, world)
    first = choices[0]
    assert micro in (None, first[1])
    assert gas in (None, first[2])
    unit = (micro or 1) * (gas or 1) * world
    if micro is None or gas is None:
        assert abs(first[0] - total) <= unit / 2 or first[0] == unit
    assert all(choice[0] == total for choice in choices[1:])


@given(total=small, micro=maybe, gas=maybe, world=st.integers(1, 16))
def test_following_the_first_cure_works(total: int, micro: int | None, gas: int | None, world: int) -> None:
    try:
        plan(total, micro, gas, world)
    except ConfigError as error:
        advice = re.search(r"cure: set train_batch_size to (\d+)", str(error))
        assert advice is not None
        plan(int(advice[1]), micro, gas, world)
