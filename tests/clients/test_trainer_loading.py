"""Models that transformers builds and loads while a ZeRO-3 config is alive: sharded from birth, true values."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from zeroshard.testing.ranks import RankPool

if not all(
    map(find_spec, ("transformers", "accelerate"))
):  # not imported here: only workers have the stand-in
    pytest.skip("not installed: transformers or accelerate", allow_module_level=True)

import loading_runs as loading
from trainer_runs import client, saved_weights, train


@pytest.mark.parametrize("tied", [True, False])
def test_from_pretrained(ranks2: RankPool, tmp_path: Path, tied: bool) -> None:
    """Each rank keeps its part, the parts are what was saved, and training goes on as DDP does."""
    for facts in ranks2.run(client, loading.loaded, str(tmp_path), tied):
        history = facts.pop("history")
        assert facts == {"sharded": True, "tied": tied, "differences": {}, "buffers": {}, "count": True}
    model = "llama" if tied else "untied"
    expected = ranks2.run(client, train, str(tmp_path / "ddp"), None, model=model)[0]
    for ours, theirs in zip(history[:4], expected[:4], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    found, wanted = saved_weights(tmp_path / "final"), saved_weights(tmp_path / "ddp/final")
    assert found.keys() == wanted.keys()
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5


@pytest.mark.parametrize("size", [70, 50])
@pytest.mark.parametrize("tied", [True, False])
def test_resize_token_embeddings(ranks2: RankPool, tmp_path: Path, size: int, tied: bool) -> None:
    for facts in ranks2.run(client, loading.resized, str(tmp_path), size, tied):
        assert facts == {
            "shapes": {(size, 24)},
            "rows": {},
            "same": True,
            "tied": tied,
            "config": size,
            "saved": (size, 24),
        }


def test_a_head_that_is_new(ranks2: RankPool, tmp_path: Path) -> None:
    for facts in ranks2.run(client, loading.new_head, str(tmp_path)):
        assert 0.01 < facts.pop("spread") < 0.04
        assert facts == {"differences": {}, "same": True, "predictions": (6, 3)}


def test_from_config(ranks2: RankPool, tmp_path: Path) -> None:
    for facts in ranks2.run(client, loading.built, str(tmp_path)):
        assert 0.015 < facts.pop("spread") < 0.025
        assert facts == {"sharded": True, "same": True}


def test_buffers_are_saved_and_loaded(ranks2: RankPool, tmp_path: Path) -> None:
    for facts in ranks2.run(client, loading.convolutional, str(tmp_path)):
        assert facts == {"differences": {}, "tracked": {3 + 8}}  # 4 steps of 2 micro-batches


def test_weights_that_are_parametrised(ranks2: RankPool, tmp_path: Path) -> None:
    """wav2vec2: what `weight_norm` makes of a weight within the constructor is loaded, sharded and trained."""
    for facts in ranks2.run(client, loading.speech, str(tmp_path)):
        assert facts["differences"] == {}
        assert facts["sharded"] == {"NOT_AVAILABLE"}
        for ours, plain in facts["losses"]:
            assert ours == pytest.approx(plain, rel=1e-6)
        assert facts["trained"] < 1e-6
