"""`optimizer.load_state_dict` on a sharded model: state of whole parameters, as plain PyTorch saves it, and its
own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import StateError
from zeroshard.testing import FP32_TOLERANCE, RankPool

STAGES = (0, 1, 2, 3)


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.Linear(7, 1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for rank in range(2):
            (model(batch(step, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def make(stage: int, **more: Any) -> zeroshard.Engine:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"gradient_clipping": 0, "zero_optimization": zero, **more}
    model = build()
    engine: zeroshard.Engine = zeroshard.initialize(model=model, optimizer=adam(model), config=config)[0]
    return engine


def go_on(rank: int, world: int, stage: int, saved: dict[str, Any], steps: int) -> list[Tensor]:
    engine = make(stage)
    engine.module.load_state_dict(saved["model"])
    assert engine.optimizer is not None
    engine.optimizer.load_state_dict(saved["optimizer"])
    for step in range(2, 2 + steps):
        engine.backward(engine(batch(step, rank)).square().mean())
        engine.step()
        own = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict(own)  # this rank's slices come back as they are
    weights = [engine.full_fp32(p).clone() for p in engine.module.parameters()]
    engine.close()
    return weights


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_whole_parameters_is_cut(ranks2: RankPool, stage: int) -> None:
    model = build()
    optimizer = adam(model)
    train(model, optimizer, range(2))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = {name: torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, d) for name, d in saved.items()}
    train(model, optimizer, range(2, 5))
    for weights in ranks2.run(go_on, stage, saved, 3):
        for expected, got in zip(model.parameters(), weights, strict=True):
            assert (expected - got).abs().max() <= FP32_TOLERANCE


def load_misfits(rank: int, world: int, stage: int) -> list[bool]:
    engine = make(stage)
    engine.backward(engine(batch(0, rank)).square().mean())
    engine.step()
    assert engine.optimizer is not None
    own = engine.optimizer.state_dict()
    held = [state["exp_avg"] for state in own["state"].values() if "exp_avg" in state]
    wrong = {
        key: {name: value.new_zeros(3, 11) if value.dim() else value for name, value in state.items()}
        for key, state in own["state"].items()
    }
    with pytest.raises(StateError, match="is another rank's part, or of another number of ranks"):
        engine.optimizer.load_state_dict({**own, "state": wrong})
    now = [state["exp_avg"] for state in engine.optimizer.state.values() if "exp_avg" in state]
    engine.close()
    return [torch.equal(a, b) for a, b in zip(held, now, strict=True)]


@pytest.mark.parametrize("stage", [1, 3])
def test_state_of_other_pieces_is_refused_and_nothing_changes(ranks2: RankPool, stage: int) -> None:
    for same in ranks2.run(load_misfits, stage):
        assert same
        assert all(same)


def load_of_rank_0(rank: int, world: int, stage: int) -> bool:
    """A script that saves on rank 0 alone, and loads that on all ranks."""
    engine = make(stage)
    engine.backward(engine(batch(0, rank)).square().mean())
    engine.step()
    assert engine.optimizer is not None
    given: list[Any] = [engine.optimizer.state_dict() if rank == 0 else None]
    torch.distributed.broadcast_object_list(given)
    refused = False
    try:
        engine.optimizer.load_state_dict(given[0])
    except StateError as error:
        refused = "another rank's parts" in str(error)
    engine.close()
    return refused


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_rank_0_is_not_that_of_others(ranks2: RankPool, stage: int) -> None:
    assert ranks2.run(load_of_rank_0, stage) == [False, stage > 0], "at stage 0 all ranks have all of it"
