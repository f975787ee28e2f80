"""Lightning's Trainer with `DeepSpeedStrategy`, unchanged: what it computes equals what its own DDP does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.testing.ranks import RankPool

pytest.importorskip("lightning")

import lightning_runs as runs
from lightning_runs import client

STAGES = [1, 2, 3]


def assert_same(found: dict[str, Any], expected: dict[str, Any], *names: str) -> None:
    for name in names or ("losses", "rates", "weights", "metrics"):
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates and clips": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "accumulates, SGD": {"model": {"sgd": True, "lr": 0.1}, "accumulate_grad_batches": 3},
    "no schedule, a short last window": {
        "model": {"schedule": None},
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.1,
    },
    "a plateau": {"model": {"schedule": "plateau"}, "max_epochs": 4},
    "a schedule by epoch": {"model": {"schedule": "epoch"}, "max_epochs": 3},
}


@pytest.fixture(scope="module")
def ddp(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Lightning's own run of every loop."""
    return {
        name: ranks2.run(client, runs.fit, None, str(tmp_path_factory.mktemp("ddp")), **loop)[0]
        for name, loop in LOOPS.items()
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_equals_ddp(
    ranks2: RankPool, tmp_path: Path, ddp: dict[str, Any], loop: str, stage: int
) -> None:
    ours = ranks2.run(client, runs.fit, stage, str(tmp_path), **LOOPS[loop])[0]
    assert_same(ours, ddp[loop])


@pytest.mark.parametrize("stage", STAGES)
def test_one_model_is_validated_trained_tested_and_trained_again(
    ranks2: RankPool, tmp_path: Path, stage: int
) -> None:
    expected = ranks2.run(client, runs.all_of_it, None, str(tmp_path))[0]
    found = ranks2.run(client, runs.all_of_it, stage, str(tmp_path))[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
