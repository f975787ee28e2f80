"""Cases that users of ZeRO engines reported in public, as tests of their kind. The letter and number of a
docstring are the case's in the project's collection; what it says is what must hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Block, Odd, features, sgd, tokens
from pairs import STAGES, Net, Pair, adamw, config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard.optimizers import Lamb, Muon
from zeroshard.testing import BF16_TOLERANCE, FP32_TOLERANCE, RankPool, assert_parity

BF16 = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
every_stage = pytest.mark.parametrize("stage", STAGES)


def mean_square(net: Any, step: int, at: int, micro: int = 0) -> Tensor:
    return net(features(step, micro, at)).float().square().mean()


# ---- A: silent wrong numbers ------------------------------------------------------------------------


class Twice(nn.Module):
    """One encoder on two inputs; `how` recomputes it."""

    how = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(6, 5) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def encode(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = (
                block(x)
                if self.how == "plain"
                else checkpoint(block, x, use_reentrant=self.how == "reentrant")
            )
        return x

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.clone().requires_grad_(), (-2 * x).requires_grad_()
        return self.head(self.encode(first) - self.encode(second)).float().square().mean()


class TwiceRecomputed(Twice):
    how = "recomputed"


class TwiceReentrant(Twice):
    how = "reentrant"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model_fn", [Twice, TwiceRecomputed, TwiceReentrant])
@every_stage
def test_a_module_on_two_inputs(ranks2: RankPool, stage: int, model_fn: Any, precision: str) -> None:
    """A 4, B 21: both uses count once each, with and without checkpointing."""
    more = BF16 if precision == "bf16" else {}
    # Two nested backwards bring two gradients; the engine adds them in fp32, plain PyTorch in bf16.
    rounds = precision == "bf16" and model_fn is TwiceReentrant
    limit = BF16_TOLERANCE if rounds else FP32_TOLERANCE
    assert_parity(model_fn, features, config(stage, **more), optimizer_fn=sgd, pool=ranks2, tolerance=limit)


def bucket_sizes(rank: int, world: int, stage: int, precision: str) -> list[float]:
    """Largest differences of the weights from those trained with one bucket for all."""
    trained = []
    elements = sum(p.numel() for p in Odd().parameters())
    for size in (5 * elements, 1, 97):
        pair = Pair.of(
            rank,
            world,
            stage,
            Odd,
            sgd,
            zero={"reduce_bucket_size": size},
            **(BF16 if precision == "bf16" else {}),
        )
        for step in range(5):
            pair.engine.backward(pair.engine(tokens(step, 0, rank)))
            pair.engine.step()
        trained.append([pair.engine.full_fp32(p) for p in pair.model.parameters() if p.numel()])
        pair.engine.close()
    return [
        max(float((a - b).abs().max()) for a, b in zip(trained[0], other, strict=True))
        for other in trained[1:]
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@every_stage
def test_the_bucket_size_changes_no_bit(ranks2: RankPool, stage: int, precision: str) -> None:
    """A 5: one element, a prime number, five times the model. A sum over two ranks has one order only."""
    assert ranks2.run(bucket_sizes, stage, precision) == [[0.0, 0.0]] * 2


def norms(rank: int, world: int, stage: int) -> list[float]:
    pair = Pair.of(rank, world, stage, Net, sgd, **BF16)
    found = []
    for step in range(10):
        pair.engine.backward(mean_square(pair.engine, step, rank))
        result = pair.engine.step()
        assert result.loss_scale == 1.0
        assert pair.engine.loss_scale() == 1.0
        assert zeroshard.safe_get_full_grad(pair.model.heads[0].weight) is None
        found.append(result.grad_norm)
        assert pair.engine.get_global_grad_norm() == result.grad_norm
    pair.engine.close()
    return found


def test_the_norm_is_the_same_at_every_stage(ranks2: RankPool) -> None:
    """A 8: stage 0 under bf16 has the norm of the other stages, no loss scale, and gradients of one step only."""
    by_stage = [ranks2.run(norms, stage) for stage in STAGES]
    expected = torch.tensor(by_stage[0][0])
    for results in by_stage:
        for found in results:
            assert torch.allclose(torch.tensor(found), expected, rtol=1e-5, atol=0)


def drift(rank: int, world: int, stage: int, accumulate: str | None) -> float:
    """Relative error of the sum of 256 equal small gradients."""
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False)
    nn.init.zeros_(model.weight)
    data_types = {} if accumulate is None else {"data_types": {"grad_accum_dtype": accumulate}}
    engine, _, _, _ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config=config(stage, gradient_accumulation_steps=512, bf16={"enabled": True}, **data_types),
    )
    for _ in range(512):
        engine.backward(engine(torch.ones(1, 16)).sum())
        engine.step()
    error = float((engine.full_fp32(model.weight) + 1).abs().max())
    engine.close()
    return error


@every_stage
def test_the_accumulator_is_fp32_unless_told(ranks2: RankPool, stage: int) -> None:
    """A 9: 512 micro-batches of equal small gradients; asking for bf16 shows what it costs."""
    assert max(ranks2.run(drift, stage, None, timeout=30)) <= 1e-3
    assert min(ranks2.run(drift, stage, "bf16", timeout=30)) >= 0.1


def losses(rank: int, world: int, stage: int, accumulation: int, fp16: bool) -> tuple[float, float]:
    """(the loss the user has after backward, what backward returns)."""
    more = {"fp16": {"enabled": True}} if fp16 else {}
    pair = Pair.of(rank, world, stage, gradient_accumulation_steps=accumulation, **more)
    loss = mean_square(pair.engine, 0, rank)
    returned = pair.engine.backward(loss)
    assert not returned.requires_grad
    found = float(loss.detach()), float(returned)
    pair.engine.close()
    return found


@pytest.mark.parametrize("fp16", [False, True])
@every_stage
def test_the_loss_that_users_see_is_theirs(ranks2: RankPool, stage: int, fp16: bool) -> None:
    """A 18: the loss is left alone; `backward` returns it divided by the accumulation steps, without scale."""
    for (alone, same), (of_eight, eighth) in zip(
        ranks2.run(losses, stage, 1, fp16), ranks2.run(losses, stage, 8, fp16), strict=True
    ):
        assert alone == same == of_eight
        assert eighth == pytest.approx(alone / 8)


def accumulated(rank: int, world: int, stage: int, precision: str) -> tuple[float, list[float]]:
    """(relative error of the gradient just before the step, its sums of all parameters)."""
    more = BF16 if precision == "bf16" else {}
    pair = Pair.of(rank, world, stage, Net, sgd, gradient_accumulation_steps=4, **more)
    compute = copy.deepcopy(pair.reference)
    if precision == "bf16":
        compute = compute.bfloat16()
    totals = {name: torch.zeros(p.shape) for name, p in compute.named_parameters()}
    worst, sums = 0.0, []
    for micro in range(4):
        pair.engine.backward(mean_square(pair.engine, 0, rank, micro))
        for at in range(world):
            x = features(0, micro, at).to(next(compute.parameters()).dtype)
            (compute(x).float().square().mean() / 4).backward()
            for name, p in compute.named_parameters():
                if p.grad is not None:
                    totals[name] += p.grad.float() / world
                    p.grad = None
        if micro < 3:
            pair.engine.step()
    for name, parameter in pair.model.named_parameters():
        gradient = zeroshard.safe_get_full_grad(parameter)
        if gradient is not None:
            scale = float(totals[name].abs().max())
            worst = max(worst, float((gradient - totals[name]).abs().max()) / scale)
            sums.append(float(gradient.double().sum()))
    pair.engine.close()
    return worst, sums


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@every_stage
def test_all_micro_batches_are_in_the_gradient(ranks2: RankPool, stage: int, precision: str) -> None:
    """N 122: what stands before the step is the same on all ranks, and the mean of all four micro-batches."""
    (first, sums), (second, others) = ranks2.run(accumulated, stage, precision)
    assert max(first, second) <= 2e-6
    assert sums == others


# ---- B: freedom of the loop -------------------------------------------------------------------------


class Vector(TwiceReentrant):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x.clone().requires_grad_()))


def given_gradient(rank: int, world: int, stage: int) -> float:
    """Three iterations of a non-scalar backward through reentrant checkpoints."""
    pair = Pair.of(rank, world, stage, Vector)

    def backward(net: Any, step: int, at: int, share: float) -> None:
        out = net(features(step, 0, at))
        out.backward(torch.cos(out.detach()) * share)

    for step in range(3):
        backward(pair.engine, step, rank, 1.0)
        pair.engine.step()
        for at in range(world):
            backward(pair.reference, step, at, 1 / world)
        pair.update()
    return pair.finish()


@every_stage
def test_a_given_gradient_through_reentrant_checkpoints(ranks2: RankPool, stage: int) -> None:
    """B 28: the second iteration works as the first."""
    assert max(ranks2.run(given_gradient, stage)) <= 1e-6


# ---- F: groups, optimizers, schedules ---------------------------------------------------------------


def two_rates(rank: int, world: int, stage: int) -> tuple[float, list[list[float]]]:
    pair = Pair.of(
        rank,
        world,
        stage,
        optimizer_fn=two_groups,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    )
    rates = []
    for step in range(6):
        pair.engine.backward(mean_square(pair.engine, step, rank))
        pair.everybody(lambda net, at, s=step: mean_square(net, s, at))
        rates.append(pair.engine.get_lr())
        for group, rate in zip(pair.expected.param_groups, rates[-1], strict=True):
            group["lr"] = rate
        pair.engine.step()
        pair.update()
    return pair.finish(), rates


def two_groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": model.blocks.parameters(), "lr": 1e-2, "weight_decay": 0.1},
            {"params": model.heads.parameters(), "lr": 1e-4, "weight_decay": 0.0},
        ],
        eps=1e-3,
    )


@every_stage
def test_a_schedule_of_the_config_over_two_groups(ranks2: RankPool, stage: int) -> None:
    """F 60, 62, 63: each group warms up to its own rate, in order, and the update has those rates."""
    for error, rates in ranks2.run(two_rates, stage):
        assert error <= 1e-6
        assert rates[-1] == pytest.approx([1e-2, 1e-4])
        assert all(rate[0] == pytest.approx(100 * rate[1]) for rate in rates)
        assert rates[1][0] < rates[2][0] < rates[3][0]


def muon(model: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2 and min(p.shape) > 1]
    rest = [p for p in model.parameters() if p.ndim != 2 or min(p.shape) <= 1]
    return Muon(
        [
            {"params": matrices, "use_muon": True, "lr": 0.02},
            {"params": rest, "use_muon": False, "lr": 0.01, "eps": 1e-3},
        ]
    )


def torch_muon(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)


def lamb(model: Any) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)


class OnlyMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(3))
        self.head = nn.Linear(7, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, 1))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x).float().square().mean()


class Scalar(Net):
    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return super().forward(x, head).float().square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model_fn", "optimizer_fn"), [(Scalar, muon), (OnlyMatrices, torch_muon), (Scalar, lamb)]
)
@every_stage
def test_optimizers_of_whole_matrices(
    ranks2: RankPool, stage: int, model_fn: Any, optimizer_fn: Any, precision: str
) -> None:
    """F 66: the matrix sees the same update as in one process, also accumulated in fp32 under bf16."""
    more = {**BF16, "gradient_accumulation_steps": 2} if precision == "bf16" else {}
    # The orthogonalisation runs in bf16: an input that differs in its last bit may come out differently.
    assert_parity(
        model_fn, features, config(stage, **more), optimizer_fn=optimizer_fn, pool=ranks2, tolerance=2e-3
    )


# ---- G: norms, fp16 ---------------------------------------------------------------------------------


def clipped(rank: int, world: int, stage: int) -> list[tuple[float, float, float, float]]:
    pair = Pair.of(rank, world, stage, optimizer_fn=plain_sgd, gradient_clipping=0.01)
    found = []
    for step in range(3):
        pair.engine.backward(100 * mean_square(pair.engine, step, rank))
        before = [pair.engine.full_fp32(p) for p in pair.model.parameters()]
        result = pair.engine.step()
        after = [pair.engine.full_fp32(p) for p in pair.model.parameters()]
        moved = sum(float((a - b).double().square().sum()) for a, b in zip(after, before, strict=True)) ** 0.5
        pair.everybody(lambda net, at, s=step: 100 * mean_square(net, s, at))
        norm = float(torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.01))
        pair.update()
        found.append((result.grad_norm / norm, result.clip_coefficient * norm, moved, pair.distance()))
    pair.engine.close()
    return found


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@every_stage
def test_clipping_is_told_apart_from_the_norm(ranks2: RankPool, stage: int) -> None:
    """G 70: the norm is the one before clipping, the coefficient stands beside it, and weights move by 0.01."""
    for found in ranks2.run(clipped, stage):
        for norm, product, moved, distance in found:
            assert norm == pytest.approx(1.0, rel=1e-5)
            assert product == pytest.approx(0.01, rel=1e-5)
            assert moved == pytest.approx(0.01, rel=1e-3)
            assert distance <= 1e-6


def hysteresis(rank: int, world: int, stage: int) -> list[tuple[float, bool]]:
    """Rank 1 overflows at steps 1, 3 and 4."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 100}
    pair = Pair.of(rank, world, stage, optimizer_fn=adamw, fp16=fp16)
    found = []
    for step in range(6):
        loss = mean_square(pair.engine, step, rank)
        pair.engine.backward(loss * (torch.inf if rank == 1 and step in (1, 3, 4) else 1.0))
        result = pair.engine.step()
        found.append((pair.engine.loss_scale(), result.skipped))
    assert (pair.engine.global_steps, pair.engine.applied_steps, pair.engine.skipped_steps) == (6, 3, 3)
    pair.engine.close()
    return found


@every_stage
def test_tolerated_overflows(ranks2: RankPool, stage: int) -> None:
    """G 73: one rank's overflow skips on all; the first is tolerated by the config's hysteresis."""
    expected = [(256, False), (256, True), (256, False), (128, True), (64, True), (64, False)]
    assert ranks2.run(hysteresis, stage) == [expected] * 2
