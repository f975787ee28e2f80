from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.loss_scale import LossScale


def trace(steps: str, **options: object) -> list[float]:
    """The scale after each step; `x` is an overflow, `!` an overflow that could not halve."""
    scale = LossScale(options.pop("value", 16.0), dynamic=True, **options)  # type: ignore[arg-type]
    values = []
    for step in steps:
        possible = scale.update(step != ".")
        assert possible == (step != "!"), f"{values}"
        values.append(scale.value)
    return values


# The vectors of the reference implementation (window 4, minimum 1).
@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        ("x.x.....", {"hysteresis": 2}, [16, 16, 8, 8, 8, 8, 8, 16]),
        ("x.x....", {"hysteresis": 2, "consecutive": True}, [16] * 7),
        ("x.x.....", {"hysteresis": 2, "consecutive": True}, [16] * 7 + [32]),
        ("xxxx!", {"hysteresis": 1}, [8, 4, 2, 1, 1]),
        ("......", {}, [16, 16, 16, 16, 32, 32]),
        (".........", {}, [16, 16, 16, 16, 32, 32, 32, 32, 64]),
        ("x.....x", {"hysteresis": 1}, [8, 8, 8, 8, 8, 16, 8]),
        # After one drop the tolerance stays used up until a full clean window.
        ("xxx..x", {"hysteresis": 2}, [16, 8, 4, 4, 4, 2]),
        ("xx.....x", {"hysteresis": 2}, [16, 8, 8, 8, 8, 8, 16, 16]),
        ("x", {"hysteresis": 1, "minimum": 12.0}, [12]),
    ],
)
def test_vectors(steps: str, options: dict[str, object], expected: list[float]) -> None:
    assert trace(steps, window=4, **options) == expected


def test_a_static_scale_never_moves() -> None:
    scale = LossScale(128.0)
    assert all(scale.update(overflow) for overflow in [True] * 20 + [False] * 2000)
    assert scale.value == 128.0
    assert not scale.at_minimum


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1.0, 2.0, 16.0]),
)
def test_bounds_and_resumption(
    overflows: list[bool], window: int, hysteresis: int, consecutive: bool, minimum: float
) -> None:
    def fresh() -> LossScale:
        return LossScale(
            64.0,
            dynamic=True,
            window=window,
            hysteresis=hysteresis,
            consecutive=consecutive,
            minimum=minimum,
        )

    scale = fresh()
    for overflow in overflows:
        before = scale.value
        possible = scale.update(overflow)
        assert scale.value >= minimum
        assert scale.value in (before, before * 2, max(before / 2, minimum))
        assert scale.value <= before or not overflow
        assert possible or (overflow and scale.at_minimum)
        again = fresh()
        again.load_state_dict(scale.state_dict())
        assert again.state_dict() == scale.state_dict()


@pytest.mark.parametrize("bad", [{"value": 0}, {"hysteresis": 0}, {"window": 0}, {"minimum": 0}])
def test_values_that_make_no_sense(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        LossScale(**{"value": 1.0, **bad})  # type: ignore[arg-type]
