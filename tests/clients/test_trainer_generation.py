"""Generation with the weights that are trained, sharded or gathered."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from zeroshard.testing.ranks import RankPool

if not all(map(find_spec, ("transformers", "trl"))):  # not imported here: only workers have the stand-in
    pytest.skip("not installed: transformers or trl", allow_module_level=True)

import generation_runs as generation
from trainer_runs import client

STAGES = [1, pytest.param(2, marks=pytest.mark.slow), 3]


@pytest.mark.parametrize("stage", STAGES)
def test_generate_on_the_model(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    """As the trained weights do in a plain model, also where ranks generate different lengths."""
    for facts in ranks2.run(client, generation.generated, str(tmp_path), stage):
        assert "trl" in facts or stage < 3
        assert all(facts.values()), facts


@pytest.mark.parametrize("stage", STAGES)
def test_predict_with_generate(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    found = ranks2.run(client, generation.seq2seq, str(tmp_path / "ours"), stage)
    expected = ranks2.run(client, generation.seq2seq, str(tmp_path / "ddp"), None)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.pop("loss") == pytest.approx(theirs.pop("loss"), rel=1e-6)
        assert ours == theirs
