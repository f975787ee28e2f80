from __future__ import annotations

from zeroshard.layout import ModuleSpec, ParameterSpec, plan_layout
from zeroshard.paths import MAX_PATHS, Paths
from zeroshard.policy import Policy
from zeroshard.trace import parse_actions


def paths() -> Paths:
    """Four buckets of 16 elements on 2 ranks, freed after every use."""
    specs = [ParameterSpec(name=f"b{i}", shape=(16,), dtype="float32", trainable=True) for i in range(4)]
    leaves = tuple(
        ModuleSpec(path=f"m{i}", type_name="M", parameters=(f"b{i}",), is_leaf=True) for i in range(4)
    )
    policy = Policy.of_stage(3, 2, persistence_threshold=0, max_reuse_distance=0)
    return Paths(plan_layout(ModuleSpec(path="", type_name="R", children=leaves), specs, policy), policy)


LONG, SHORT = parse_actions("0F 0f 1F 1f 2F 2f"), parse_actions("0F 0f 2F 2f")


def test_the_latest_path_of_a_kind_is_expected_next() -> None:
    known = paths()
    assert known.expected(True) is None
    known.learn(True, LONG)
    known.learn(False, SHORT)
    assert known.expected(True).points == LONG  # type: ignore[union-attr]
    assert known.expected(False).points == SHORT  # type: ignore[union-attr]
    assert [schedule.points for schedule in known.schedules] == [LONG, SHORT]


def test_a_path_is_found_by_its_beginning() -> None:
    known = paths()
    known.learn(True, LONG)
    known.learn(True, SHORT)
    assert known.beginning_with(True, SHORT[:2]).points == SHORT  # type: ignore[union-attr]
    assert known.beginning_with(True, LONG[:3]).points == LONG  # type: ignore[union-attr]
    assert known.beginning_with(True, parse_actions("3F")) is None
    assert known.beginning_with(False, LONG[:3]) is None
    assert known.expected(True).expects(2, SHORT[2])  # type: ignore[union-attr]
    assert not known.expected(True).expects(4, SHORT[2])  # type: ignore[union-attr]


def test_the_least_recently_used_is_forgotten() -> None:
    known = paths()
    known.learn(True, LONG)
    for length in range(1, MAX_PATHS + 1):
        known.learn(True, SHORT * length)
        if length == 1:
            known.learn(True, LONG)
    assert len(known.schedules) == MAX_PATHS
    assert known.beginning_with(True, LONG) is not None
    assert known.beginning_with(True, SHORT * 2) is not None


def test_the_peak_is_a_guess_first_and_then_the_schedules() -> None:
    known = paths()
    bytes_of_a_bucket = 32 * 4  # 16 elements, padded so that both shards are aligned
    assert known.predicted_peak() == 3 * bytes_of_a_bucket
    known.learn(True, parse_actions("0F 0f"))
    assert known.predicted_peak() == bytes_of_a_bucket
