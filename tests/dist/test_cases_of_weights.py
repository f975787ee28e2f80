"""Cases that users of ZeRO engines reported in public about weights: read, edited, frozen, saved and loaded. The
letter and number of a docstring are the case's in the project's collection; what it says is what must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, features, sgd
from pairs import STAGES, Net, Pair, adamw, attempt, config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard import zero
from zeroshard.testing import RankPool, assert_parity

BF16 = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
every_stage = pytest.mark.parametrize("stage", STAGES)


def mean_square(net: Any, step: int, at: int) -> Tensor:
    return net(features(step, 0, at)).float().square().mean()


# ---- D: sharded parameters seen by user code ------------------------------------------------------------


class Borrows(nn.Module):
    """The parent uses a child's weights in its own forward, element by element, before and after the child runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.last.weight[0] * self.last.bias
        x = self.first(x) + self.first.weight.diagonal()
        for block in self.blocks:
            x = block(x) + block.up.bias.sum() * block.norm.weight
        return (self.last(x) + self.first.bias).square().mean()


@every_stage
def test_a_parent_uses_its_childrens_weights(ranks2: RankPool, stage: int) -> None:
    """D 42: nothing is registered."""
    assert_parity(Borrows, features, config(stage), optimizer_fn=sgd, pool=ranks2)


def truth(parameter: Tensor) -> list[Any]:
    """What can be asked of a weight wherever it is."""
    like = torch.zeros_like(parameter)
    return [
        *(
            parameter.shape,
            parameter.size(),
            parameter.size(0),
            parameter.ndim,
            parameter.dim(),
            len(parameter),
        ),
        *(
            parameter.numel(),
            parameter.nelement(),
            torch.numel(parameter),
            parameter.stride(),
            parameter.nbytes,
        ),
        *(parameter.dtype, parameter.device, parameter.element_size(), parameter.is_floating_point()),
        *(
            parameter.requires_grad,
            parameter.is_leaf,
            parameter.grad,
            parameter.is_contiguous(),
            parameter.layout,
        ),
        *(like.shape, like.dtype, like.device, float(like.abs().sum()), torch.rand_like(parameter).shape),
        *(torch.full_like(parameter, 2.0, dtype=torch.float64).dtype, parameter.new_zeros(3).dtype),
    ]


def asked(rank: int, world: int, stage: int) -> int:
    """Of trainable and frozen weights: while sharded, gathered, in flight after a step, in evaluation."""
    pair = Pair.of(rank, world, stage, HalfFrozen, sgd_of_trained, bf16={"enabled": True})
    pair.reference.bfloat16()
    expected = [truth(parameter) for parameter in pair.reference.parameters()]
    asked = 0

    def ask() -> None:
        nonlocal asked
        for parameter, known in zip(pair.model.parameters(), expected, strict=True):
            assert truth(parameter) == known
            asked += 1

    ask()
    with pair.engine.gathered():
        ask()
    pair.engine.backward(mean_square(pair.engine, 0, rank))
    ask()
    pair.engine.step()
    ask()
    pair.engine.eval()
    with torch.no_grad():
        pair.engine(features(1, 0, rank))
        ask()
    pair.engine.close()
    return asked


@every_stage
def test_weights_tell_the_truth(ranks2: RankPool, stage: int) -> None:
    """D 47."""
    assert min(ranks2.run(asked, stage)) > 50


class Few(nn.Module):
    """Fewer elements than ranks: a head with a bias of one element, and groups that hold nothing but such."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.head = nn.Linear(3, 1)
        self.gain = nn.Parameter(torch.ones(2))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.head(torch.tanh(self.body(x)) * self.gain.sum()) - 1
        ).square().mean() + self.nothing.sum()


def few_groups(model: Any) -> torch.optim.Optimizer:
    """A tensor without elements in the middle of a group, and last in another."""
    return torch.optim.AdamW(
        [
            {"params": [model.head.bias], "lr": 3e-2},
            {"params": [model.body.weight, model.nothing, model.body.bias]},
            {"params": [model.gain]},
            {"params": [model.head.weight]},
        ],
        lr=1e-2,
        eps=1e-3,
    )


def nothing_last(model: Any) -> torch.optim.Optimizer:
    rest = [p for p in model.parameters() if p.numel()]
    return torch.optim.AdamW([*rest, model.nothing], lr=1e-2, eps=1e-3)


@pytest.mark.parametrize("optimizer_fn", [few_groups, nothing_last])
@every_stage
def test_fewer_elements_than_ranks(ranks4: RankPool, stage: int, optimizer_fn: Any) -> None:
    """D 49, D 50."""
    assert_parity(Few, features, config(stage), optimizer_fn=optimizer_fn, ranks=4, pool=ranks4)


def without_elements(rank: int, world: int, stage: int, optimizer_fn: Any) -> float:
    """Trained, saved, loaded into a fresh engine, and trained on."""
    pair = Pair.of(rank, world, stage, Few, optimizer_fn)
    for step in range(2):
        pair.engine.backward(pair.engine(features(step, 0, rank)))
        pair.engine.step()
        pair.everybody(lambda net, at, s=step: net(features(s, 0, at)))
        pair.update()
    state = pair.engine.full_state_dict(rank0_only=False)
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        key: tuple(value.shape) for key, value in pair.reference.state_dict().items()
    }
    pair.engine.close()
    again = Pair.of(rank, world, stage, Few, optimizer_fn, seed=5)
    again.model.load_state_dict(state)
    again.reference.load_state_dict(pair.reference.state_dict())
    again.engine.backward(again.engine(features(2, 0, rank)))
    again.engine.step()
    again.everybody(lambda net, at: net(features(2, 0, at)))
    again.update()
    return again.finish()


@pytest.mark.parametrize("optimizer_fn", [few_groups, nothing_last])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_tensor_without_elements(ranks2: RankPool, stage: int, optimizer_fn: Any) -> None:
    """D 50."""
    assert max(ranks2.run(without_elements, stage, optimizer_fn)) <= 1e-6


# ---- E: frozen --------------------------------------------------------------------------------------------


class HalfFrozen(Net):
    """Half of it frozen, with values that are recognised."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        for number, parameter in enumerate(self.blocks[0].parameters()):
            parameter.data.fill_(number + torch.initial_seed() % 100)


def restored(rank: int, world: int, stage: int, path: str) -> bool:
    """A file that rank 0 writes brings the frozen values back on all ranks, in a model of another seed."""
    pair = Pair.of(rank, world, stage, HalfFrozen, sgd_of_trained, seed=17, **BF16)
    pair.engine.backward(mean_square(pair.engine, 0, rank))
    pair.engine.step()
    state = pair.engine.full_state_dict()
    if rank == 0:
        torch.save(state, path)
    whole = {name: pair.engine.full_fp32(p) for name, p in pair.model.named_parameters()}
    pair.engine.close()
    torch.distributed.barrier()
    fresh = Pair.of(rank, world, stage, HalfFrozen, sgd_of_trained, seed=3, **BF16)
    assert bool((fresh.engine.full_fp32(fresh.model.blocks[0].up.weight) == 5).all())
    fresh.model.load_state_dict(torch.load(path))
    found = {name: fresh.engine.full_fp32(p) for name, p in fresh.model.named_parameters()}
    assert bool((found["blocks.0.up.weight"] == 19).all())
    fresh.engine.close()
    return all(torch.equal(found[name], value.bfloat16().to(value.dtype)) for name, value in whole.items())


def sgd_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@every_stage
def test_frozen_values_are_restored(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    """E 53."""
    assert all(ranks2.run(restored, stage, str(tmp_path / "weights.pt")))


class NormedBlock(nn.Module):
    """A frozen norm before a Linear that trains, in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Recomputed(nn.Module):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.float().square().mean()


class RecomputedReentrant(Recomputed):
    reentrant = True


def recomputed(rank: int, world: int, stage: int) -> list[Tensor]:
    """Weights after some steps, by both kinds of checkpointing; nothing stays gathered after a backward."""
    found = []
    for model_fn in (Recomputed, RecomputedReentrant):
        pair = Pair.of(rank, world, stage, model_fn, sgd, **BF16)
        for step in range(4):
            pair.engine.backward(pair.engine(features(step, 0, rank)))
            assert not any(
                buffer.is_live for buffer in pair.engine._states.buffers if not buffer.layout.resident
            )
            pair.engine.step()
        found.append(
            torch.cat([pair.engine.full_fp32(p).float().reshape(-1) for p in pair.model.parameters()])
        )
        pair.engine.close()
    return found


@every_stage
def test_a_frozen_norm_is_recomputed(ranks2: RankPool, stage: int) -> None:
    """E 56."""
    for plain, reentrant in ranks2.run(recomputed, stage):
        assert torch.equal(plain, reentrant)


# ---- K: edits ----------------------------------------------------------------------------------------------


def zeroed(rank: int, world: int, stage: int) -> tuple[bool, float]:
    """(a weight that was set to zero in the middle of a training stays so, what then was trained differs)."""
    pair = Pair.of(rank, world, stage, Net, adamw, **BF16)
    weight = pair.model.blocks[1].up.weight
    for step in range(2):
        pair.engine.backward(mean_square(pair.engine, step, rank))
        pair.engine.step()
    with zero.GatheredParameters(weight, modifier_rank=0):
        if rank == 0:
            weight.data.zero_()  # the idiom of most scripts, which leaves no version behind
    rates = [group["lr"] for group in pair.optimizer.param_groups]
    for group in pair.optimizer.param_groups:
        group["lr"] = 0.0
    pair.engine.backward(mean_square(pair.engine, 2, rank))
    pair.engine.step()
    still = (
        not pair.engine.full_fp32(weight).any() and not pair.model.state_dict()["blocks.1.up.weight"].any()
    )
    for group, rate in zip(pair.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    pair.engine.backward(mean_square(pair.engine, 3, rank))
    pair.engine.step()
    moved = float(pair.engine.full_fp32(weight).abs().max())
    pair.engine.close()
    return still, moved


@every_stage
def test_a_weight_set_to_zero_stays_zero(ranks2: RankPool, stage: int) -> None:
    """K 107."""
    for still, moved in ranks2.run(zeroed, stage):
        assert still
        assert 0 < moved < 0.1


def averaged(rank: int, world: int, stage: int) -> tuple[tuple[str, str], float]:
    """An average of the weights, itself sharded: updated in a block without a writer, with one, and by shards."""
    pair = Pair.of(rank, world, stage, Net, adamw)
    torch.manual_seed(0)
    average = Net().requires_grad_(False)
    engine, *_ = zeroshard.initialize(model=average, config=config(stage))
    torch.manual_seed(0)
    expected = Net().requires_grad_(False)
    both = list(zip(average.parameters(), pair.model.parameters(), strict=True))

    def update() -> None:
        for kept, new in both:
            kept.data.lerp_(new.data, 0.25)

    found = ("nothing", "")
    for step in range(4):
        pair.engine.backward(mean_square(pair.engine, step, rank))
        pair.engine.step()
        pair.everybody(lambda net, at, s=step: mean_square(net, s, at))
        pair.update()
        for kept, new in zip(expected.parameters(), pair.reference.parameters(), strict=True):
            kept.lerp_(new.detach(), 0.25)
        if step == 0:
            before = {name: engine.full_fp32(p) for name, p in average.named_parameters()}

            def without_writer() -> None:
                with zero.GatheredParameters([p for pair in both for p in pair]):
                    update()

            found = attempt(without_writer)
            if stage == 3:
                assert all(torch.equal(engine.full_fp32(p), before[n]) for n, p in average.named_parameters())
            else:  # there the edit is in the weights that it was made in
                average.load_state_dict(before)
        if step % 2:
            for kept, new in both:
                local = zeroshard.safe_get_local_fp32_param(kept)
                value = local.lerp(zeroshard.safe_get_local_fp32_param(new).view_as(local), 0.25)
                zeroshard.safe_set_local_fp32_param(kept, value)
        else:
            with zero.GatheredParameters(pair.model), zero.GatheredParameters(average, modifier_rank=0):
                update()
    engine.close()
    pair.finish()
    pairs = zip(average.parameters(), expected.parameters(), strict=True)
    return found, max(float((p - q).detach().abs().max()) for p, q in pairs)


@every_stage
def test_an_average_of_weights(ranks2: RankPool, stage: int) -> None:
    """K 108: an error without a writer; with one, and shard by shard, it is the average of plain PyTorch."""
    for (kind, message), distance in ranks2.run(averaged, stage):
        assert kind == "ShardedAccessError"
        assert "modifier_rank=0" in message
        assert distance <= 1e-6
