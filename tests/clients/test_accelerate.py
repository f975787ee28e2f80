"""Plain accelerate with `DeepSpeedPlugin`, unchanged: what it computes equals what accelerate's own DDP does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from zeroshard.testing.ranks import RankPool

if find_spec("accelerate") is None:  # not imported here: only workers have the stand-in
    pytest.skip("accelerate is not installed", allow_module_level=True)

import accelerate_runs as runs
from accelerate_runs import client

STAGES = [1, 2, 3]
COMPARED = "losses", "norms", "rates", "evaluated", "weights"


def assert_same(found: dict[str, Any], expected: dict[str, Any], *names: str) -> None:
    for name in names or COMPARED:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def ddp(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Accelerate's own run of every loop."""
    return {
        kind: ranks2.run(client, runs.train, None, str(tmp_path_factory.mktemp("ddp")), kind=kind)[0]
        for kind in runs.KINDS
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_loop_equals_ddp_and_resumes(
    ranks2: RankPool, tmp_path: Path, ddp: dict[str, Any], kind: str, stage: int
) -> None:
    """Windows of 3 over 7 batches: the last one of an epoch has one batch."""
    ours = ranks2.run(client, runs.train, stage, str(tmp_path), kind=kind, save=True)
    assert_same(ours[0], ddp[kind])
    assert ours[0]["inner"] == "Net"
    assert len(ours[0]["norms"]) == (4 if kind == "carried" else 6)
    assert ours[0]["evaluated"].shape == (2, 13)
    saved = load_file(tmp_path / "model/model.safetensors")
    torch.testing.assert_close(saved["up.weight"], ours[0]["weights"]["up.weight"], rtol=0, atol=0)
    if kind not in ("own", "dummies", "callable"):  # "carried" is saved in the middle of a window
        return
    resumed = ranks2.run(client, runs.train, stage, str(tmp_path), kind=kind, resume=True)[0]
    assert_same(resumed, ours[0], "evaluated", "weights")
    assert resumed["losses"] == pytest.approx(ours[0]["losses"][7:], rel=1e-6)
    assert resumed["rates"] == pytest.approx(ours[0]["rates"][7:], rel=1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_several_models(ranks2: RankPool, stage: int) -> None:
    expected = ranks2.run(client, runs.distil, None)[0]
    found = ranks2.run(client, runs.distil, stage)[0]
    assert_same(found, expected, "losses", "both")


@pytest.mark.parametrize("stage", [2, 3])
def test_mixed_precision(ranks2: RankPool, stage: int) -> None:
    half = ranks2.run(client, runs.halves, stage, "fp16")[0]
    other = ranks2.run(client, runs.halves, stage, "bf16")[0]
    assert (half["dtype"], other["dtype"]) == ("torch.float16", "torch.bfloat16")
    assert half["skipped"] == [False, True, False]
    assert half["rates"] == pytest.approx([1 / 30, 1 / 30, 1 / 50])  # two ticks per step: one for each rank
    assert other["skipped"] == [False] * 3
    assert other["losses"] == pytest.approx(half["losses"][:2] + other["losses"][2:], rel=2e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_dynamo_backend(ranks2: RankPool, stage: int) -> None:
    expected = ranks2.run(client, runs.compiled, None)[0]
    assert ranks2.run(client, runs.compiled, stage)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_of_hugging_face(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    theirs, ours = tmp_path / "ddp", tmp_path / "ours"
    expected = ranks2.run(client, runs.language_model, None, str(theirs))[0]
    found = ranks2.run(client, runs.language_model, stage, str(ours))[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["born"] == ("ShardedParameter" if stage == 3 else "Parameter")
    torch.testing.assert_close(
        load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors"), rtol=1e-6, atol=1e-6
    )
