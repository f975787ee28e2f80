"""Every stage equals plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    Checkpointed,
    CheckpointedPairs,
    CheckpointedReentrant,
    External,
    Frozen,
    Odd,
    ReentrantInside,
    ReturnsView,
    Shared,
    SideOutput,
    TwoInputs,
    features,
    sgd,
    tokens,
    two_groups,
)
from torch import nn

from zeroshard.optimizers import AdamWithoutBiasCorrection, Lion
from zeroshard.testing import FP32_TOLERANCE, RankPool, assert_parity

STAGES = (0, 1, 2, 3)


def config(stage: int, **more: Any) -> dict[str, Any]:
    """Stage 3 with nothing kept: every gather and free happens."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    zero.update(more.pop("zero", {}))
    return {"gradient_clipping": 0, **more, "zero_optimization": zero}


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_odd_model(ranks2: RankPool, stage: int, accumulation: int) -> None:
    settings = config(stage, gradient_accumulation_steps=accumulation)
    assert_parity(Odd, tokens, settings, optimizer_fn=two_groups, pool=ranks2, steps=6)


@pytest.mark.parametrize("stage", STAGES)
def test_odd_model_on_four_ranks(ranks4: RankPool, stage: int) -> None:
    settings = config(stage, gradient_accumulation_steps=2, gradient_clipping=0.05)
    assert_parity(Odd, tokens, settings, optimizer_fn=two_groups, pool=ranks4, ranks=4)


def lion(model: nn.Module) -> torch.optim.Optimizer:
    return Lion(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)


def adam_without_bias_correction(model: nn.Module) -> torch.optim.Optimizer:
    return AdamWithoutBiasCorrection(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1)


@pytest.mark.parametrize("optimizer_fn", [lion, adam_without_bias_correction])
@pytest.mark.parametrize("stage", STAGES)
def test_own_elementwise_optimizers(ranks2: RankPool, stage: int, optimizer_fn: Any) -> None:
    assert_parity(Odd, tokens, config(stage), optimizer_fn=optimizer_fn, pool=ranks2, steps=6)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping(ranks2: RankPool, stage: int) -> None:
    settings = config(stage, gradient_clipping=0.01)
    assert_parity(Odd, tokens, settings, optimizer_fn=sgd, pool=ranks2)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_bf16(ranks2: RankPool, stage: int, accumulation: int) -> None:
    settings = config(stage, gradient_accumulation_steps=accumulation, bf16={"enabled": True})
    assert_parity(Odd, tokens, settings, optimizer_fn=sgd, pool=ranks2)
    settings["communication_data_type"] = "fp32"
    assert_parity(Odd, tokens, settings, optimizer_fn=sgd, pool=ranks2, tolerance=FP32_TOLERANCE)


@pytest.mark.parametrize(
    "model_fn",
    [External, ReturnsView, Shared, SideOutput, Frozen, ReentrantInside, TwoInputs],
)
@pytest.mark.parametrize("stage", STAGES)
def test_use_outside_the_own_module(ranks2: RankPool, stage: int, model_fn: Callable[[], Any]) -> None:
    assert_parity(model_fn, features, config(stage), optimizer_fn=sgd, pool=ranks2)


@pytest.mark.parametrize("model_fn", [Checkpointed, CheckpointedReentrant, CheckpointedPairs])
@pytest.mark.parametrize("stage", [2, 3])
def test_activation_checkpointing(ranks2: RankPool, stage: int, model_fn: Callable[[], Any]) -> None:
    assert_parity(model_fn, tokens, config(stage), optimizer_fn=sgd, pool=ranks2)


@pytest.mark.parametrize(
    "knobs",
    [
        {"reduce_bucket_size": 1},
        {"reduce_bucket_size": 97},
        {"stage3_prefetch_bucket_size": 0},
        {"stage3_prefetch_bucket_size": 1_000_000_000},
        {"stage3_max_live_parameters": 100},
        {"stage3_max_reuse_distance": 1_000_000_000},
        {"stage3_max_reuse_distance": 80},
        {"stage3_param_persistence_threshold": 8},
        {"stage3_param_persistence_threshold": 100_000},
        {"stage3_param_persistence_threshold": 100_000, "stage3_model_persistence_threshold": 60},
    ],
    ids=lambda knobs: ",".join(f"{key}={value}" for key, value in knobs.items()),
)
@pytest.mark.parametrize("stage", [2, 3])
def test_no_knob_changes_the_result(ranks2: RankPool, stage: int, knobs: dict[str, int]) -> None:
    assert_parity(Odd, tokens, config(stage, zero=knobs), optimizer_fn=two_groups, pool=ranks2)
