"""What users call that is not `forward`, in any mix, and weights that are used where no hook sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Block, features
from pairs import Pair, attempt
from torch import Tensor, nn

import zeroshard
from zeroshard.testing import RankPool

KEPT = {"stage3_max_reuse_distance": 1_000_000_000}


class Speaker(nn.Module):
    """Encodes, decodes step by step, and has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(6, 5) for _ in range(2))
        self.decoder = nn.ModuleList(Block(6, 7) for _ in range(2))
        self.head = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    @property
    def width(self) -> int:
        return self.head.weight.shape[1] + self.scale.numel() - len(self.scale)

    def encode(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = block(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        for block in self.decoder:
            x = block(x)
        return self.head(x)

    def generate(self, x: Tensor, steps: int) -> Tensor:
        x = self.encode(x)
        for _ in range(steps):
            x = self.decode(x).tanh()
        return x

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.scaled(self.encode(x))).square().mean()


def calls(net: Any, step: int, at: int) -> tuple[Tensor, Tensor]:
    """(a loss of methods and modules called from outside, what was generated in between)."""
    x = features(step, 0, at)
    kind = step % 4
    if kind == 0:
        loss = net(x)
    elif kind == 1:
        loss = net.encode(x).square().mean()  # a part alone
    elif kind == 2:
        loss = net.decode(net.encode(x)).square().mean() + net(x)
    else:
        loss = net.decoder[1](net.decoder[0](x)).abs().mean()
    with torch.no_grad():
        generated = net.generate(x, 2 + step % 2)  # between the forward and its backward
    return loss, generated


def mixed(rank: int, world: int, stage: int, knobs: dict[str, Any]) -> dict[str, Any]:
    """Train in all modes, with generation between forward and backward, every fourth step in eval mode, some
    steps with a part of the model in eval mode."""
    pair = Pair.of(rank, world, stage, Speaker, zero=knobs)
    assert pair.engine.width == 6
    divergences, apart = [], 0.0
    for step in range(16):
        for net in (pair.model, pair.reference):
            net.train(step % 4 != 0)
            net.encoder.train(step % 3 != 0)
        loss, generated = calls(pair.engine, step, rank)
        apart = max(apart, float((generated - calls(pair.reference, step, rank)[1]).abs().max()))
        pair.engine.backward(loss)
        pair.everybody(lambda net, at, s=step: calls(net, s, at)[0])
        pair.engine.step()
        pair.update()
        divergences.append(pair.engine.executor.divergences)
    live = [b.layout.name for b in pair.engine._states.buffers if b.is_live and not b.layout.resident]
    refused = attempt(lambda: pair.engine.scaled(features(0, 0, 0)))
    with pair.engine.gathered(pair.model.scale):
        apart = max(
            apart, float((pair.engine.scaled(torch.ones(2, 6)) - pair.reference.scale).detach().abs().max())
        )
    return {
        "divergences": divergences,
        "apart": apart,
        "live": live,
        "refused": refused,
        "error": pair.finish(),
    }


@pytest.mark.parametrize(("stage", "knobs"), [(0, {}), (2, {}), (3, {}), (3, KEPT)])
def test_methods_in_any_mix(ranks2: RankPool, stage: int, knobs: dict[str, Any]) -> None:
    """C 37, 38 and more: equal to plain PyTorch; each path is left once at most, however they alternate."""
    for found in ranks2.run(mixed, stage, knobs):
        assert found["error"] <= 1e-6
        assert found["apart"] <= 1e-6
        assert found["live"] == []
        assert found["divergences"][-1] == found["divergences"][7]  # all was seen twice by then
        if stage == 3:
            kind, message = found["refused"]
            assert kind == "ShardedAccessError"
            assert "'scale' (shape (6,))" in message
            assert "engine.gathered" in message


# ---- gradients that come late -----------------------------------------------------------------------


class EarlyReader(nn.Module):
    """Reads its last layer's weights long before that layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.last.bias
        if self.training:
            x = x @ self.last.weight
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).square().mean()


def late(rank: int, world: int, stage: int, how: str) -> float:
    """Two micro-batches. A bias is resident, or the weights are live, so that no touch tells of the early use."""
    knobs = {"stage3_param_persistence_threshold": 6} if how == "resident" else KEPT
    pair = Pair.of(rank, world, stage, EarlyReader, zero=knobs, gradient_accumulation_steps=2)
    for net in (pair.model, pair.reference):
        net.train(how != "resident")
    for step in range(4):
        for micro in range(2):
            if how == "held":
                with pair.engine.gathered():
                    pair.engine.backward(pair.engine(features(step, micro, rank)))
            else:
                pair.engine.backward(pair.engine(features(step, micro, rank)))
            pair.everybody(lambda net, at, s=step, m=micro: net(features(s, m, at)), factor=0.5)
            if micro and step % 2:  # else the step finds them
                shown = zeroshard.safe_get_full_grad(pair.model.last.bias)
                assert float((shown - pair.reference.last.bias.grad).abs().max()) <= 1e-6
            pair.engine.step()
        pair.update()
    return pair.finish()


@pytest.mark.parametrize("how", ["resident", "held", "kept"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_come_after_the_reduction(ranks2: RankPool, stage: int, how: str) -> None:
    assert max(ranks2.run(late, stage, how)) <= 1e-6
