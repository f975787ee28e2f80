"""`engine.backward(loss, tokens=n)`: the mean over all tokens of all ranks and micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Block, features
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import StateError
from zeroshard.testing import RankPool

STAGES = (0, 1, 2, 3)
COUNTS = ((1, 7), (0, 4), (3, 1))
"""Tokens of (rank 0, rank 1) in each of three micro-batches."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int, micro: int, rank: int) -> Tensor:
    x = torch.cat([features(step, micro, rank), features(step + 50, micro, rank)])
    return x[: COUNTS[micro][rank]]


def loss_of(x: Tensor) -> Tensor:
    """The mean over tokens; of none, zero."""
    return x.float().square().sum() / max(x.shape[0], 1)


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {"gradient_clipping": 0.5, "gradient_accumulation_steps": 3, **more, "zero_optimization": zero}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weighted(rank: int, world: int, stage: int) -> tuple[float, float, float]:
    """(difference of weights, norm, norm of the reference) after two windows of unequal micro-batches."""
    torch.manual_seed(0)
    reference, model = Net(), Net()
    model.load_state_dict(reference.state_dict())
    expected = sgd(reference)
    engine, *_ = zeroshard.initialize(model=model, optimizer=sgd(model), config=config(stage))
    for step in range(2):
        for micro in range(3):
            x = batch(step, micro, rank)
            engine.backward(loss_of(engine(x)), tokens=x.shape[0])
            engine.step()
        everything = torch.cat([batch(step, micro, other) for micro in range(3) for other in range(world)])
        loss_of(reference(everything)).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        expected.step()
        expected.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = max(float((engine.full_fp32(p) - q).abs().max()) for p, q in pairs)
    measured = engine.get_global_grad_norm()
    engine.close()
    return worst, measured, float(norm)


@pytest.mark.parametrize("stage", STAGES)
def test_the_mean_is_over_tokens(ranks2: RankPool, stage: int) -> None:
    for worst, norm, expected in ranks2.run(weighted, stage):
        assert worst <= 1e-6
        assert norm == pytest.approx(expected, rel=1e-6)


def dropped(rank: int, world: int, stage: int, how: str) -> float:
    """A bad micro-batch is dropped, and its tokens with it."""
    torch.manual_seed(0)
    reference, model = Net(), Net()
    model.load_state_dict(reference.state_dict())
    settings = config(stage, gradient_accumulation_steps=1, gradient_clipping=0)
    engine, optimizer, _, _ = zeroshard.initialize(model=model, optimizer=sgd(model), config=settings)
    engine.backward(loss_of(engine(batch(0, 1, rank))), tokens=4)
    (engine if how == "engine" else optimizer).zero_grad()
    x = batch(0, 0, rank)
    engine.backward(loss_of(engine(x)), tokens=x.shape[0])
    engine.step()
    loss_of(reference(torch.cat([batch(0, 0, other) for other in range(world)]))).backward()
    sgd(reference).step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = max(float((engine.full_fp32(p) - q).abs().max()) for p, q in pairs)
    engine.close()
    return worst


@pytest.mark.parametrize("how", ["engine", "optimizer"])
@pytest.mark.parametrize("stage", STAGES)
def test_dropped_tokens_do_not_count(ranks2: RankPool, stage: int, how: str) -> None:
    assert max(ranks2.run(dropped, stage, how)) <= 1e-6


def two_engines(rank: int, world: int, stage: int) -> float:
    """A weighted joint loss: the other engine's gradients have the weight too, and know it."""
    torch.manual_seed(0)
    references = [Net(), Net()]
    models = copy.deepcopy(references)
    settings = config(stage, gradient_accumulation_steps=1, gradient_clipping=0)
    engines = [
        zeroshard.initialize(model=model, optimizer=sgd(model), config=settings)[0] for model in models
    ]
    x = batch(0, 0, rank)
    engines[0].backward(loss_of(engines[1](engines[0](x))), tokens=x.shape[0])
    for engine in engines:
        engine.step()
    loss_of(
        references[1](references[0](torch.cat([batch(0, 0, other) for other in range(world)])))
    ).backward()
    worst = 0.0
    for engine, reference in zip(engines, references, strict=True):
        sgd(reference).step()
        pairs = zip(engine.module.parameters(), reference.parameters(), strict=True)
        worst = max(worst, *(float((engine.full_fp32(p) - q).abs().max()) for p, q in pairs))
    for engine in engines:
        engine.close()
    return worst


@pytest.mark.parametrize("stage", STAGES)
def test_the_weight_reaches_all_engines_of_a_loss(ranks2: RankPool, stage: int) -> None:
    assert max(ranks2.run(two_engines, stage)) <= 1e-6


def mixed(rank: int, world: int, how: str) -> list[str]:
    torch.manual_seed(0)
    model = Net()
    settings = config(2, gradient_accumulation_steps=2)
    engine, *_ = zeroshard.initialize(model=model, optimizer=sgd(model), config=settings)
    messages = []
    for tokens in (-1, float("nan")):
        try:
            engine.backward(loss_of(engine(features(0, 0, rank))), tokens=tokens)
        except StateError as error:
            messages.append(str(error))
    try:
        for micro in range(2):
            plain = micro == 0 if how == "micro-batch" else rank == 0
            engine.backward(loss_of(engine(features(0, micro, rank))), tokens=None if plain else 4)
            engine.step()
    except StateError as error:
        messages.append(str(error))
    engine.close()
    return messages


@pytest.mark.parametrize("how", ["micro-batch", "rank"])
def test_weights_that_cannot_be_compared(ranks2: RankPool, how: str) -> None:
    for negative, nan, some in ranks2.run(mixed, how, timeout=20):
        assert "tokens=-1" in negative
        assert "tokens=nan" in nan
        assert "2 of the 4 backwards" in some
