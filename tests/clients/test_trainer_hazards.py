"""What users do around a Trainer: metrics, losses of their own, compilation, edits, and dropping it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from zeroshard.testing.ranks import RankPool

if not all(
    map(find_spec, ("transformers", "accelerate"))
):  # not imported here: only workers have the stand-in
    pytest.skip("not installed: transformers or accelerate", allow_module_level=True)

import hazard_runs as hazards
from trainer_runs import client

STAGES = [1, pytest.param(2, marks=pytest.mark.slow), 3]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "case", [hazards.with_metrics, hazards.own_loss, hazards.with_callbacks, hazards.trained_again]
)
def test_equals_ddp(ranks2: RankPool, tmp_path: Path, stage: int, case: Any) -> None:
    found, ours = ranks2.run(client, case, str(tmp_path / "ours"), stage)[0]
    expected, theirs = ranks2.run(client, case, str(tmp_path / "ddp"), None)[0]
    assert ours == theirs
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_torch_compile(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    found, _ = ranks2.run(client, hazards.compiled, str(tmp_path / "ours"), stage, timeout=240)[0]
    expected, _ = ranks2.run(client, hazards.compiled, str(tmp_path / "ddp"), None, timeout=240)[0]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_done_to_the_model(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    for facts in ranks2.run(client, hazards.around, str(tmp_path), stage):
        assert all(facts.values()), facts


@pytest.mark.parametrize("stage", STAGES)
def test_a_trainer_that_is_dropped_is_gone(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    assert ranks2.run(client, hazards.left_alone, str(tmp_path), stage) == [{"alive": 0, "groups": 0}] * 2
