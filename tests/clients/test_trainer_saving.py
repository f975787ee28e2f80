"""Best models, weights alone, evaluation without training, 16 bit, several trainers in one process."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from zeroshard.testing.ranks import RankPool

if not all(
    map(find_spec, ("transformers", "accelerate"))
):  # not imported here: only workers have the stand-in
    pytest.skip("not installed: transformers or accelerate", allow_module_level=True)

import saving_runs as saving
from trainer_runs import client

STAGES = [1, pytest.param(2, marks=pytest.mark.slow), 3]


@pytest.mark.parametrize("stage", STAGES)
def test_load_best_model_at_end(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    found = ranks2.run(client, saving.best, str(tmp_path / "ours"), stage)[0]
    expected = ranks2.run(client, saving.best, str(tmp_path / "ddp"), None)[0]
    assert found.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-6)
    assert found == expected == {"best": "checkpoint-1", "left": ["checkpoint-1"]}


@pytest.mark.parametrize("stage", STAGES)
def test_save_only_model(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    facts = ranks2.run(client, saving.weights_only, str(tmp_path), stage)[0]
    assert not [name for name in facts["files"] if name.startswith("global_step") or name == "latest"]
    assert facts["files"].count("model.safetensors") == 1
    assert facts["loss"] == pytest.approx(facts["again"], rel=1e-6)


def test_a_checkpoint_where_weights_are_not_gathered(ranks2: RankPool, tmp_path: Path) -> None:
    facts = ranks2.run(client, saving.without_gathering, str(tmp_path))[0]
    assert "global_step4" in facts["files"]
    assert {"latest", "zero_to_fp32.py"} <= set(facts["files"])
    assert not [
        name for name in facts["files"] if name.endswith((".safetensors", ".bin")) and "args" not in name
    ]
    assert facts["wrong"] == []
    assert facts["missing"] == ["lm_head.weight"]  # tied: safetensors files have it once


@pytest.mark.parametrize("scheduler", [False, True])
def test_evaluation_without_training(ranks2: RankPool, tmp_path: Path, scheduler: bool) -> None:
    """The config of a training run, also with a scheduler that has nothing to drive; `predict`; `generate`."""
    for facts in ranks2.run(client, saving.evaluated, str(tmp_path), scheduler):
        assert facts["difference"] < 1e-6
        assert facts["engine"] == {"optimizer": None, "lr_scheduler": None}


@pytest.mark.parametrize("stage", STAGES)
def test_what_trainers_are_asked(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    for facts in ranks2.run(client, saving.attributes, str(tmp_path), stage):
        numbers = {
            "stage": stage,
            "config": stage,
            "steps": 4,
            "window": (2, 2),
            "batch": 8,
            "overflow": False,
        }
        truths = ("wrapped", "unwrapped", "count", "norm", "masters")
        assert facts == {**numbers, **dict.fromkeys(truths, True)}


@pytest.mark.parametrize("stage", STAGES)
def test_several_trainers_one_after_the_other(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    for facts in ranks2.run(client, saving.one_after_the_other, str(tmp_path), stage):
        assert not any(facts["alive"])
        assert facts["same"]
        assert len(set(facts["groups"])) == 1


def test_trials_of_a_search(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(client, saving.searched, str(tmp_path)) == [{"same": True, "other": True}] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_holds_the_scheduler_back(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    """The loss scale begins too large: steps are skipped, and the scheduler of Trainer does not move."""
    facts: dict[str, Any] = ranks2.run(client, saving.sixteen, str(tmp_path), stage, "fp16")[0]
    steps = [entry for entry in facts["history"] if "loss" in entry]
    skipped = [not math.isfinite(entry["grad_norm"]) for entry in steps]
    assert sum(skipped) == facts["skipped"] > 3
    taken = [skipped[:step].count(False) for step in range(len(steps))]
    assert [entry["learning_rate"] for entry in steps] == pytest.approx([1e-2 * (14 - n) / 14 for n in taken])
    assert facts["dtypes"] == {"torch.float16"}


@pytest.mark.parametrize("stage", STAGES)
def test_bf16(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    facts: dict[str, Any] = ranks2.run(client, saving.sixteen, str(tmp_path), stage, "bf16")[0]
    whole: dict[str, Any] = ranks2.run(client, saving.sixteen, str(tmp_path), stage, "fp32")[0]
    assert facts["dtypes"] == {"torch.bfloat16"}
    for ours, theirs in zip(facts["history"], whole["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)
