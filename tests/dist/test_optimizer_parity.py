"""Every optimizer equals itself over a plain model, with groups, and from the config with a schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Block, Odd, features, tokens
from torch import Tensor, nn

from zeroshard.optimizer import build_optimizer
from zeroshard.testing import RankPool, assert_parity
from zeroshard.testing.loops import LOOPS

STAGES = (0, 1, 2, 3)

OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"eps": 1e-4, "amsgrad": True},
    "AdamW": {"eps": 1e-4},
    "AdamWithoutBiasCorrection": {"eps": 1e-4},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adagrad": {"eps": 1e-4, "initial_accumulator_value": 0.1},
    "RMSprop": {"eps": 1e-3, "momentum": 0.9, "centered": True},
    "Lion": {},
    "Lamb": {"eps": 1e-4},
    "Adafactor": {},
    "NAdam": {"eps": 1e-4},
}


class Wide(nn.Module):
    """Blocks whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def two_groups(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Blocks with a large rate and decay; the rest with a small rate and none. No group has all of a kind."""
    inside = [p for key, p in model.named_parameters() if "blocks" in key]
    outside = [p for key, p in model.named_parameters() if "blocks" not in key]
    groups = [
        {"params": inside, "lr": 1e-3, "weight_decay": 0.1},
        {"params": outside, "lr": 1e-4, "weight_decay": 0.0},
    ]
    return build_optimizer(name, OPTIONS[name], groups, {})


class TwoGroups:
    """`two_groups` of one optimizer, as a function that can be sent and compared."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return two_groups(model, self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TwoGroups) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {"gradient_clipping": 0, **more, "zero_optimization": zero}


@pytest.mark.parametrize("stage", [0, 1, 3])  # what the optimizer holds at stage 2 is what it holds at 1
@pytest.mark.parametrize("name", OPTIONS)
def test_every_optimizer_with_two_groups(ranks2: RankPool, name: str, stage: int) -> None:
    assert_parity(Odd, tokens, config(stage), optimizer_fn=TwoGroups(name), pool=ranks2, steps=4)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Adafactor"])
def test_on_three_ranks(ranks3: RankPool, name: str, stage: int) -> None:
    assert_parity(Wide, features, config(stage), optimizer_fn=TwoGroups(name), pool=ranks3, ranks=3, steps=3)


@pytest.mark.parametrize("stage", STAGES)
def test_muon_from_the_config(ranks2: RankPool, stage: int) -> None:
    """Its groups are made by name; sums of two ranks have no order, so nothing is there to be amplified."""
    muon = {"type": "Muon", "params": {"muon_lr": 1e-3, "adam_lr": 1e-4, "eps": 1e-4, "weight_decay": 0.1}}
    assert_parity(Wide, features, config(stage, optimizer=muon), pool=ranks2)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}},
        {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2},
        },
        {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    ],
    ids=lambda scheduler: scheduler["type"],
)
@pytest.mark.parametrize("loop", ["managed", "plain"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_schedule_of_the_config(ranks2: RankPool, stage: int, loop: str, scheduler: Any) -> None:
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}}
    settings = config(stage, optimizer=adamw, scheduler=scheduler)
    assert_parity(Wide, features, settings, pool=ranks2, loop=loop)


def loop_equals(pool: RankPool, stage: int, loop: str, **section: Any) -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
    settings = config(
        stage, optimizer=sgd, gradient_accumulation_steps=3, communication_data_type="fp32", **section
    )
    assert_parity(Odd, tokens, settings, pool=pool, steps=3, loop=loop, tolerance=1e-6)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_loop(ranks2: RankPool, stage: int, loop: str) -> None:
    loop_equals(ranks2, stage, loop)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stage", [1, 3])  # one that reduces at the boundary, one with every backward
def test_every_loop_with_a_loss_scale(ranks2: RankPool, stage: int, loop: str) -> None:
    loop_equals(ranks2, stage, loop, fp16={"enabled": True, "initial_scale_power": 8})


def test_an_unknown_loop_is_named(ranks2: RankPool) -> None:
    with pytest.raises(ValueError, match="'mangaed' is not known; choose one of managed, plain"):
        assert_parity(Wide, features, config(0), pool=ranks2, loop="mangaed")
