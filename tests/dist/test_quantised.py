"""Packed weights: sharded by bytes in buckets of their own, with what hangs on them, beside weights that train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import features
from pairs import STAGES, Pair, adamw, attempt, config
from torch import Tensor, nn

import zeroshard
from zeroshard import zero
from zeroshard.testing import RankPool

every_stage = pytest.mark.parametrize("stage", STAGES)


class Packed(nn.Parameter):
    """A parameter class of its own, as bitsandbytes has: with a state and a property."""

    state: Any

    def __new__(cls, data: Tensor, state: Any = None) -> Packed:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = state
        return made

    @property
    def levels(self) -> int:
        return 256


class Quantised(nn.Module):
    """A Linear whose weight is 8-bit: levels and a scale per row."""

    def __init__(self, inputs: int, outputs: int, how: str) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs) / 3
        scale = weight.abs().amax(1, keepdim=True) / 120
        if how == "float8":
            self.weight = nn.Parameter((weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        elif how == "class":
            self.weight = Packed(((weight / scale).round() + 128).to(torch.uint8), {"zero": 128})
        else:
            shifted = (weight / scale).round() + (128 if how == "uint8" else 0)
            self.weight = nn.Parameter(shifted.to(getattr(torch, how)), requires_grad=False)
        self.weight.scale = scale
        self.zero = 128 if how in ("uint8", "class") else 0

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.to(x.dtype) - self.zero) * self.weight.scale.to(x.dtype)
        if isinstance(self.weight, Packed):
            assert self.weight.state == {"zero": 128}
        return nn.functional.linear(x, weight)


class Block(nn.Module):
    """Everything in one block: an fp32 norm, a Linear, packed weights, and an adapter beside them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.base = Quantised(6, 7, how)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.out = nn.Linear(7, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.float()).to(x.dtype) if self.norm.weight.dtype is torch.float32 else self.norm(x)
        return x + self.out(torch.tanh(self.base(y) + self.up(self.down(y))))


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def uint8() -> nn.Module:
    return Net("uint8")


def int8() -> nn.Module:
    return Net("int8")


def float8() -> nn.Module:
    return Net("float8")


def of_a_class() -> nn.Module:
    return Net("class")


def pair_of(rank: int, world: int, stage: int, model_fn: Any, **more: Any) -> Pair:
    """As `Pair.of`. A copy of a parameter has not what hangs on it, so the model is built twice."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(model_fn())
    model, reference = models
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model, optimizer=adamw(model), config=config(stage, **more)
    )
    return Pair(rank, world, engine, optimizer, model, reference, adamw(reference))


def trained(
    rank: int, world: int, stage: int, model_fn: Any, mixed: bool
) -> tuple[float, list[str], set[str]]:
    """(distance from plain PyTorch, how the packed weight describes itself while sharded, dtypes of buckets)."""
    # bf16 with norms that stay fp32; the reference computes in fp32, so only the distance tells them apart.
    more = {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["norm"]}} if mixed else {}
    pair = pair_of(rank, world, stage, model_fn, **more)
    for step in range(4):
        if step == 2:
            with torch.no_grad():  # evaluation in between
                pair.engine(features(9, 0, rank))
        pair.engine.backward(pair.engine(features(step, 0, rank)).float().square().mean())
        pair.everybody(lambda net, at, s=step: net(features(s, 0, at)).square().mean())
        pair.engine.step()
        pair.update()
    weight, expected = pair.model.blocks[1].base.weight, pair.reference.blocks[1].base.weight
    said = [
        str(x)
        for x in (tuple(weight.shape), weight.dtype, weight.device, weight.requires_grad, weight.nbytes)
    ]
    assert said == [
        str(x) for x in (tuple(expected.shape), expected.dtype, expected.device, False, expected.nbytes)
    ]
    assert isinstance(weight, type(expected))
    assert getattr(weight, "levels", 0) == getattr(expected, "levels", 0)
    assert torch.equal(weight.scale, expected.scale)
    assert torch.equal(pair.engine.full_fp32(weight).float(), expected.float())
    assert pair.engine.full_fp32(weight).dtype is expected.dtype
    with zero.GatheredParameters(weight):
        assert type(weight) is type(expected)
        assert torch.equal(weight.float(), expected.float())
    state = pair.model.state_dict()["blocks.1.base.weight"]
    assert state.dtype is expected.dtype
    assert torch.equal(state.float(), expected.float())
    pair.model.load_state_dict(pair.model.state_dict())
    distance = max(
        float((pair.engine.full_fp32(ours).float() - theirs.float()).abs().max())
        for ours, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True)
        if theirs.requires_grad
    )
    dtypes = {bucket.dtype for bucket in pair.engine.layout.buckets}
    pair.engine.close()
    assert type(weight) is type(expected)
    assert torch.equal(weight.float(), expected.float())
    return distance, said, dtypes


@pytest.mark.parametrize("model_fn", [uint8, int8, float8, of_a_class])
@every_stage
def test_packed_weights_beside_an_adapter(ranks2: RankPool, stage: int, model_fn: Any) -> None:
    """E 59."""
    for distance, _, dtypes in ranks2.run(trained, stage, model_fn, False):
        assert distance <= 1e-6
        assert "float32" in dtypes
        assert len(dtypes) == 2


@every_stage
def test_three_dtypes_in_one_block(ranks2: RankPool, stage: int) -> None:
    for distance, _, dtypes in ranks2.run(trained, stage, of_a_class, True):
        assert dtypes == {"float32", "bfloat16", "uint8"}
        assert distance <= 3e-2


def edited(rank: int, world: int, stage: int) -> list[tuple[str, str]]:
    """Edits of packed weights are kept; values of another dtype, gradients and training are refused."""
    pair = pair_of(rank, world, stage, uint8)
    weight = pair.model.blocks[0].base.weight
    with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        weight.fill_(7 + rank)
    with zero.GatheredParameters(weight):
        assert bool((weight == 8).all())
    found = [attempt(lambda: edit_without_writer(weight))]
    value = torch.arange(42, dtype=torch.uint8).view(7, 6)
    zeroshard.safe_set_full_fp32_param(weight, value)
    assert torch.equal(pair.engine.full_fp32(weight), value)
    found += [
        attempt(lambda: zeroshard.safe_set_full_fp32_param(weight, value.float())),
        attempt(lambda: zeroshard.safe_get_full_grad(weight)),
        attempt(lambda: zeroshard.safe_get_full_optimizer_state(weight, "exp_avg")),
        attempt(lambda: weight.requires_grad_(True)),
        attempt(lambda: weight + 1)
        if stage == 3
        else ("ShardedAccessError", "'blocks.0.base.weight' gathered"),
    ]
    pair.engine.close()
    return found


def edit_without_writer(weight: nn.Parameter) -> None:
    with zero.GatheredParameters(weight), torch.no_grad():
        weight[0, 0] += 1


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_edits_of_packed_weights(ranks2: RankPool, stage: int) -> None:
    for unnamed, cast, gradient, state, trains, read in ranks2.run(edited, stage):
        assert unnamed[0] == "ShardedAccessError"
        assert "modifier_rank" in unnamed[1]
        assert cast[0] == "StateError"
        assert "'blocks.0.base.weight', which holds packed uint8 values" in cast[1]
        assert gradient[0] == state[0] == "StateError"
        assert "'blocks.0.base.weight' is not trained" in gradient[1]
        assert trains[0] == "RuntimeError"  # torch's own
        assert read[0] == "ShardedAccessError"
        assert "'blocks.0.base.weight'" in read[1]


def trains_packed(rank: int, world: int) -> list[tuple[str, str]]:
    """float8 values could require grad; at the start and later that is an error with their name."""
    net = float8()
    net.blocks[1].base.weight.requires_grad_(True)
    found = [attempt(lambda: pair_of(rank, world, 3, lambda: net))]
    pair = pair_of(rank, world, 3, float8)
    pair.model.blocks[1].base.weight.requires_grad_(True)
    found.append(attempt(lambda: pair.engine(features(0, 0, rank))))
    pair.engine.close()
    return found


def test_packed_weights_do_not_train(ranks2: RankPool) -> None:
    for found in ranks2.run(trains_packed):
        assert [kind for kind, _ in found] == ["ModelError", "StateError"]
        for _, message in found:
            assert (
                "'blocks.1.base.weight' holds packed float8_e4m3fn values, which cannot be trained" in message
            )
