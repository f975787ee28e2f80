"""The global norm, whoever asks for it: of all shards, equal on all ranks, equal to the unsharded one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Odd, tokens

import zeroshard
from zeroshard.errors import StateError
from zeroshard.testing import RankPool

PRECISIONS = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}}}


def by_hand(
    rank: int, world: int, stage: int, precision: str, plain: bool
) -> tuple[float, float, float, float]:
    """(norm, reference norm, norm after clipping, largest difference of weights) with a limit of 0.01."""
    torch.manual_seed(0)
    model = Odd()
    reference = copy.deepcopy(model)
    settings = {
        "gradient_clipping": 0,
        "gradient_accumulation_steps": 2,
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **PRECISIONS[precision],
    }
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=settings
    )
    for micro in range(2):
        loss = engine(tokens(0, micro, rank)) / 2
        loss.backward() if plain else engine.backward(loss, scale_wrt_gas=False)
    norm = engine.clip_grad_norm_(0.01)
    optimizer.step()
    for micro in range(2):
        for other in range(world):
            (reference(tokens(0, micro, other)) / 2 / world).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    result = engine.last_step
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = max(float((engine.full_fp32(p) - q).abs().max()) for p, q in pairs if q.numel())
    engine.close()
    return norm, float(expected), result.grad_norm, worst


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clip_grad_norm(ranks2: RankPool, stage: int, precision: str, plain: bool) -> None:
    near = 1e-6 if precision == "fp32" else 2e-2
    results = ranks2.run(by_hand, stage, precision, plain)
    for norm, expected, after, worst in results:
        assert norm == pytest.approx(expected, rel=near)
        assert after == pytest.approx(0.01, rel=1e-4)
        assert worst <= near * 0.01 + 1e-7
    assert results[0][:3] == results[1][:3]


def mistakes(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, config={})
    messages = []
    engine.backward(engine(tokens(0, 0, rank)))
    for action in (lambda: engine.clip_grad_norm_(0.0), lambda: scaled_step(optimizer)):
        try:
            action()
        except StateError as error:
            messages.append(str(error))
    engine.close()
    return messages


def scaled_step(optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def test_mistakes(ranks2: RankPool) -> None:
    for limit, scaler in ranks2.run(mistakes):
        assert "clip_grad_norm_(0.0)" in limit
        assert "GradScaler" in scaler
        assert "torch_autocast" in scaler


def unused(rank: int, world: int, stage: int) -> list[str]:
    torch.manual_seed(0)
    model = Odd()
    zero = {"stage": stage, "ignore_unused_parameters": False}
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"zero_optimization": zero},
    )
    messages = []
    for _ in range(2):
        engine.backward(engine(tokens(0, 0, rank)))
        try:
            engine.step()
        except StateError as error:
            messages.append(str(error))
        model.unused.requires_grad_(False)
        engine.zero_grad()
    engine.close()
    return messages


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_can_be_refused(ranks2: RankPool, stage: int) -> None:
    for messages in ranks2.run(unused, stage):
        assert len(messages) == 1  # what is frozen by now is not unused
        assert "(2 in all) got no gradient" in messages[0]
        assert "'unused." in messages[0]
        assert "ignore_unused_parameters is false" in messages[0]
