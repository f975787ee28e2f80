"""transformers' Trainer with `deepspeed=`, unchanged: what it logs and saves equals what it does under DDP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from zeroshard.testing.ranks import RankPool

if not all(
    map(find_spec, ("transformers", "accelerate"))
):  # not imported here: only workers have the stand-in
    pytest.skip("not installed: transformers or accelerate", allow_module_level=True)

import trainer_runs as runs
from trainer_runs import DS_OPTIMIZER, DS_SCHEDULER, client, ds_config

History = list[dict[str, float]]


@pytest.fixture(scope="module")
def ddp(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[History, Path]]:
    """What Trainer does without deepspeed, and where it saved; each run is made once."""
    made: dict[str, tuple[History, Path]] = {}

    def run(**how: Any) -> tuple[History, Path]:
        key = repr(sorted(how.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("ddp")
            made[key] = ranks2.run(client, runs.train, str(out), None, **how)[0], out
        return made[key]

    return run


@pytest.fixture(scope="module")
def ranks1() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


def assert_alike(found: History, expected: History, tolerance: float = 1e-6) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-9)


def assert_same_weights(ours: Path, theirs: Path, tolerance: float = 1e-5) -> None:
    found, expected = runs.saved_weights(ours), runs.saved_weights(theirs)
    assert found.keys() == expected.keys()
    assert expected
    worst = {name: float((found[name] - value).abs().max()) for name, value in expected.items()}
    assert max(worst.values()) <= tolerance, worst


def without_rates(history: History) -> History:
    return [{key: value for key, value in entry.items() if key != "learning_rate"} for entry in history]


# ---- training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hf_optimizer_and_scheduler(ranks2: RankPool, tmp_path: Path, ddp: Any, stage: int) -> None:
    how = {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    found = ranks2.run(client, runs.train, str(tmp_path), ds_config(stage), **how)
    assert found[0] == found[1]
    expected, saved = ddp(**how)
    assert_alike(found[0], expected)
    assert_same_weights(tmp_path / "final", saved / "final")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ds_optimizer_and_hf_scheduler(ranks2: RankPool, tmp_path: Path, ddp: Any, stage: int) -> None:
    """The engine owns both, so the rate that Trainer logs is the next step's, as with DeepSpeed."""
    found = ranks2.run(client, runs.train, str(tmp_path), ds_config(stage, **DS_OPTIMIZER))
    expected, saved = ddp()
    assert_alike(without_rates(found[0]), without_rates(expected))
    rates = [entry["learning_rate"] for entry in expected if "loss" in entry]
    assert [entry["learning_rate"] for entry in found[0] if "loss" in entry] == pytest.approx(
        [*rates[1:], 0.0]
    )
    assert_same_weights(tmp_path / "final", saved / "final")


GUIDE: dict[str, Any] = {
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
    },
}
"""What the configs of transformers' guide have beside."""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ds_optimizer_and_ds_scheduler_from_a_file(
    ranks2: RankPool, tmp_path: Path, ddp: Any, stage: int
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(ds_config(stage, **DS_OPTIMIZER, **DS_SCHEDULER, **GUIDE)))
    found = ranks2.run(client, runs.train, str(tmp_path), str(file), warmup_steps=2)
    expected, saved = ddp(rates=(0.0, 0.0, 0.5, 1.0, 0.5))
    assert_alike(without_rates(found[0]), without_rates(expected))
    assert_same_weights(tmp_path / "final", saved / "final")


VARIANTS: dict[str, dict[str, Any]] = {
    "short last windows": {
        "max_steps": -1,
        "num_train_epochs": 2,
        "data": 14,
        "gradient_accumulation_steps": 3,
    },
    "short last windows, mean over samples": {
        "model": "per_sample",
        "max_steps": -1,
        "num_train_epochs": 2,
        "data": 14,
        "gradient_accumulation_steps": 3,
    },
    "mean over samples": {"model": "per_sample"},
    "recomputation": {"gradient_checkpointing": True},
    "reentrant recomputation": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "no clipping": {"max_grad_norm": 0.0},
    "much clipping": {"max_grad_norm": 0.05},
    "untied": {"model": "untied"},
    "lora": {"model": "lora"},
    "lora, recomputation": {"model": "lora", "gradient_checkpointing": True},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
}


FAST = {
    (1, "short last windows"),
    (2, "short last windows, mean over samples"),
    (1, "reentrant recomputation"),
}


@pytest.mark.parametrize(
    ("variant", "stage"),
    [
        pytest.param(
            name,
            stage,
            marks=() if stage == 3 or (stage, name) in FAST else pytest.mark.slow,
            id=f"{name}-{stage}",
        )
        for name in VARIANTS
        for stage in (1, 2, 3)
    ],
)
def test_variants(ranks2: RankPool, tmp_path: Path, ddp: Any, variant: str, stage: int) -> None:
    how = VARIANTS[variant]
    found = ranks2.run(client, runs.train, str(tmp_path), ds_config(stage), **how)
    expected, saved = ddp(**how)
    assert_alike(found[0], expected)
    assert_same_weights(tmp_path / "final", saved / "final")


# ---- saving and going on --------------------------------------------------------------------------------


RESUMED = {(1, "llama", "hf"), (2, "lora", "ds"), (3, "llama", "ds"), (3, "lora", "hf")}


@pytest.mark.parametrize(
    ("stage", "model", "owner"),
    [
        pytest.param(*case, marks=() if case in RESUMED else pytest.mark.slow)
        for case in product((1, 2, 3), ("llama", "lora"), ("hf", "ds"))
    ],
)
def test_a_resumed_run_equals_one_that_did_not_stop(
    ranks2: RankPool, tmp_path: Path, stage: int, model: str, owner: str
) -> None:
    config = ds_config(stage, **({**DS_OPTIMIZER, **DS_SCHEDULER} if owner == "ds" else {}))
    how = {"model": model, "save_strategy": "steps", "save_steps": 2}
    whole = ranks2.run(client, runs.train, str(tmp_path), config, **how)[0]
    again = ranks2.run(
        client, runs.train, str(tmp_path), config, resume=str(tmp_path / "checkpoint-2"), **how
    )[0]
    assert_alike(again, whole, tolerance=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resuming_at_another_world_size(
    ranks1: RankPool, ranks2: RankPool, tmp_path: Path, stage: int
) -> None:
    """From two ranks to one and back: as under DDP, whose checkpoints are whole."""
    how = {"save_strategy": "steps", "save_steps": 2}
    histories = []
    for name, config in {"ours": ds_config(stage), "ddp": None}.items():
        out = tmp_path / name
        ranks2.run(client, runs.train, str(out), config, **how)
        one = ranks1.run(client, runs.train, str(out), config, resume=str(out / "checkpoint-2"), **how)
        two = ranks2.run(
            client, runs.train, str(out), config, resume=str(out / "checkpoint-4"), **{**how, "max_steps": 6}
        )
        histories.append((one[0], two[0]))
    for found, expected in zip(*histories, strict=True):
        assert_alike(found, expected)
