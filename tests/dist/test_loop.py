"""The loop is the user's: managed or plain, several backwards, engines that share a loss, windows cut short."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, Odd, features, tokens
from torch import Tensor, nn

import zeroshard
from zeroshard.testing import RankPool

STAGES = (0, 1, 2, 3)


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {"gradient_clipping": 0, **more, "zero_optimization": zero}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def engine_of(model: nn.Module, stage: int, **more: Any) -> tuple[Any, Any]:
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model, optimizer=sgd(model), config=config(stage, **more)
    )
    return engine, optimizer


def pair(model_fn: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = model_fn()
    return reference, copy.deepcopy(reference)


def distance(model: nn.Module, reference: nn.Module) -> float:
    both = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p - q).abs().max()) for p, q in both if p.numel())


class Net(nn.Module):
    """Two blocks and two heads; `forward` picks the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads[head](x)


def plain_loop(rank: int, world: int, stage: int) -> float:
    reference, model = pair(Odd)
    expected = sgd(reference)
    _, optimizer = engine_of(model, stage)
    for step in range(4):
        model(tokens(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for other in range(world):
            (reference(tokens(step, 0, other)) / world).backward()
        expected.step()
        expected.zero_grad()
    return finish(_, model, reference)


def finish(engine: Any, model: nn.Module, reference: nn.Module) -> float:
    engine.close()
    return distance(model, reference)


def several_backwards(rank: int, world: int, stage: int) -> float:
    """Three backwards, then a step, though the config says accumulation 1; one goes through both heads."""
    reference, model = pair(Net)
    expected = sgd(reference)
    engine, optimizer = engine_of(model, stage)
    for step in range(3):
        x = features(step, 0, rank)
        engine(x, 0).square().mean().backward()
        first, second = engine(x, 0), engine(x * 2, 1)
        (first.square().mean() + second.abs().mean()).backward()
        out = engine(x, 1)
        out.backward(torch.ones_like(out))
        optimizer.step()
        optimizer.zero_grad()
        for other in range(world):
            x = features(step, 0, other)
            (reference(x, 0).square().mean() / world).backward()
            ((reference(x, 0).square().mean() + reference(x * 2, 1).abs().mean()) / world).backward()
            out = reference(x, 1)
            out.backward(torch.ones_like(out) / world)
        expected.step()
        expected.zero_grad()
    return finish(engine, model, reference)


def retained_graph(rank: int, world: int, stage: int) -> float:
    reference, model = pair(Net)
    expected = sgd(reference)
    engine, optimizer = engine_of(model, stage)
    for step in range(3):
        loss = engine(features(step, 0, rank)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        for other in range(world):
            (2 * reference(features(step, 0, other)).square().mean() / world).backward()
        expected.step()
        expected.zero_grad()
    return finish(engine, model, reference)


def heads_by_rank(rank: int, world: int, stage: int, bucket_size: int) -> tuple[float, float]:
    """Each rank trains another head (one unit, or resident, so gathers do not differ)."""
    reference, model = pair(Net)
    expected = sgd(reference)
    zero = config(stage)
    zero["zero_optimization"].update(leaf_module={"names": ["heads"]}, reduce_bucket_size=bucket_size)
    engine, optimizer, _, _ = zeroshard.initialize(model=model, optimizer=sgd(model), config=zero)
    for step in range(4):
        engine(features(step, 0, rank), rank % 2).square().mean().backward()
        optimizer.step()
        for other in range(world):
            (reference(features(step, 0, other), other % 2).square().mean() / world).backward()
        expected.step()
        expected.zero_grad()
    engine.close()
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    return distance(model, reference), float(total)


def no_sync(rank: int, world: int, stage: int) -> float:
    reference, model = pair(Odd)
    expected = sgd(reference)
    engine, optimizer = engine_of(model, stage)
    for step in range(3):
        with engine.no_sync():
            for micro in range(3):
                (engine(tokens(step, micro, rank)) / 4).backward()
        if step < 2:  # the last window is cut short: only what no_sync collected
            (engine(tokens(step, 3, rank)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        for other in range(world):
            for micro in range(4 if step < 2 else 3):
                (reference(tokens(step, micro, other)) / 4 / world).backward()
        expected.step()
        expected.zero_grad()
    return finish(engine, model, reference)


def dropped_gradients(rank: int, world: int, stage: int, how: str, when: str) -> float:
    """A bad batch: its gradients are dropped by zero_grad, after they were reduced or before."""
    reference, model = pair(Odd)
    expected = sgd(reference)
    engine, optimizer = engine_of(model, stage, gradient_accumulation_steps=2 if when == "counting" else 1)
    for step in range(3):
        with engine.no_sync() if when == "no_sync" else contextlib.nullcontext():
            model(tokens(step, 1, rank)).backward()
        if how == "engine":
            engine.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=how == "optimizer")
        model(tokens(step, 0, rank)).backward()
        optimizer.step()
        if how != "optimizer, zeros":
            optimizer.zero_grad()
        for other in range(world):
            (reference(tokens(step, 0, other)) / world).backward()
        expected.step()
        expected.zero_grad()
    return finish(engine, model, reference)


def taking_turns(rank: int, world: int, stage: int) -> float:
    """GAN-like: two engines, alternating steps, each loss running through both models."""
    (maker, made), (judge, judged) = pair(Net), pair(Net)
    expected = {id(net): sgd(net) for net in (maker, judge)}
    engine_g, optimizer_g = engine_of(made, stage)
    engine_d, optimizer_d = engine_of(judged, stage)
    for step in range(4):
        x = features(step, 0, rank)
        loss = engine_d(torch.cat([engine_g(x), engine_g(x)], -1)).square().mean()
        loss.backward()
        (optimizer_g if step % 2 else optimizer_d).step()
        engine_g.zero_grad()
        engine_d.zero_grad()
        for other in range(world):
            x = features(step, 0, other)
            (judge(torch.cat([maker(x), maker(x)], -1)).square().mean() / world).backward()
        expected[id(maker if step % 2 else judge)].step()
        maker.zero_grad()
        judge.zero_grad()
    engine_g.close()
    engine_d.close()
    return max(distance(made, maker), distance(judged, judge))


def frozen_teacher(rank: int, world: int, stage: int) -> float:
    reference, model = pair(Net)
    teacher_reference, teacher = pair(Net)
    teacher.requires_grad_(False)
    expected = sgd(reference)
    engine, optimizer = engine_of(model, stage)
    teaching, _, _, _ = zeroshard.initialize(model=teacher, config=config(stage))
    for step in range(3):
        x = features(step, 0, rank)
        with torch.no_grad():
            target = teaching(x, 1)
        (engine(x) - target).square().mean().backward()
        optimizer.step()
        for other in range(world):
            x = features(step, 0, other)
            ((reference(x) - teacher_reference(x, 1).detach()).square().mean() / world).backward()
        expected.step()
        expected.zero_grad()
    teaching.close()
    engine.close()
    return max(distance(model, reference), distance(teacher, teacher_reference))


def scheduler_and_groups(rank: int, world: int, stage: int) -> float:
    """A torch scheduler built on the optimizer before `initialize` still drives it."""
    reference, model = pair(Net)
    results = []
    for net in (reference, model):
        optimizer = torch.optim.AdamW(
            [
                {"params": net.blocks.parameters(), "lr": 1e-2},
                {"params": [], "lr": 5e-3},
                {"params": net.heads.parameters(), "lr": 1e-3, "weight_decay": 0.5},
            ]
        )
        results.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)))
    (expected, expected_schedule), (optimizer, schedule) = results
    engine, returned, _, _ = zeroshard.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(stage)
    )
    assert returned is optimizer
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in expected.param_groups
    ]
    for step in range(4):
        engine.backward(engine(features(step, 0, rank)).square().mean())
        engine.step()
        for other in range(world):
            (reference(features(step, 0, other)).square().mean() / world).backward()
        expected.step()
        expected.zero_grad()
        expected_schedule.step()
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in expected.param_groups]
    return finish(engine, model, reference)


def existing_state(rank: int, world: int, stage: int) -> float:
    """An optimizer that has stepped before is taken over with its state."""
    reference, model = pair(Net)
    optimizers = []
    for net in (reference, model):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        net(features(9, 0, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizers.append(optimizer)
    engine, optimizer, _, _ = zeroshard.initialize(model=model, optimizer=optimizers[1], config=config(stage))
    for step in range(3):
        engine.backward(engine(features(step, 0, rank)).square().mean())
        engine.step()
        for other in range(world):
            (reference(features(step, 0, other)).square().mean() / world).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    return finish(engine, model, reference)


@pytest.mark.parametrize(
    "case",
    [
        plain_loop,
        several_backwards,
        retained_graph,
        no_sync,
        taking_turns,
        frozen_teacher,
        scheduler_and_groups,
        existing_state,
    ],
    ids=lambda case: case.__name__,
)
@pytest.mark.parametrize("stage", STAGES)
def test_equal_to_plain_pytorch(ranks2: RankPool, stage: int, case: Callable[..., float]) -> None:
    assert max(ranks2.run(case, stage)) <= 1e-6


def small_terms(rank: int, world: int, stage: int, synced: bool) -> float:
    """1024 equal small gradients in bf16, none announced in the config; the relative error of their sum."""
    torch.manual_seed(0)
    model = nn.Linear(64, 8, bias=False)
    nn.init.zeros_(model.weight)
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config=config(stage, bf16={"enabled": True}),
    )
    for _ in range(1024):
        with contextlib.nullcontext() if synced else engine.no_sync():
            (engine(torch.ones(1, 64)).sum() * 2**-12).backward()
    optimizer.step()
    error = float((engine.full_fp32(model.weight) + 1024 * 2**-12).abs().max()) / (1024 * 2**-12)
    engine.close()
    return error


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_small_bf16_gradients_are_not_lost_in_the_sum(ranks2: RankPool, stage: int, synced: bool) -> None:
    assert max(ranks2.run(small_terms, stage, synced)) <= 1e-2


class WithBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("flags", torch.rand(3) > 0.5)
        self.register_buffer("count", torch.randint(0, 9, ()))


def seeds_by_rank(rank: int, world: int, stage: int) -> bool:
    """Ranks that built different weights all train rank 0's."""
    torch.manual_seed(rank)
    model = WithBuffers()
    torch.manual_seed(0)
    expected = WithBuffers()
    engine, _ = engine_of(model, stage)
    engine.close()
    known = expected.state_dict()
    return all(torch.equal(value, known[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stage", STAGES)
def test_everybody_starts_from_the_values_of_rank_0(ranks2: RankPool, stage: int) -> None:
    assert all(ranks2.run(seeds_by_rank, stage))


@pytest.mark.parametrize("when", ["reduced", "no_sync", "counting"])
@pytest.mark.parametrize("how", ["engine", "optimizer", "optimizer, zeros"])
@pytest.mark.parametrize("stage", STAGES)
def test_dropped_gradients_are_gone(ranks2: RankPool, stage: int, how: str, when: str) -> None:
    assert max(ranks2.run(dropped_gradients, stage, how, when)) <= 1e-6


@pytest.mark.parametrize("bucket_size", [1, 500_000_000])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_use_different_heads(ranks2: RankPool, stage: int, bucket_size: int) -> None:
    """With a bucket per parameter, buckets become ready in another order on each rank."""
    results = ranks2.run(heads_by_rank, stage, bucket_size)
    assert max(error for error, _ in results) <= 1e-6
    assert results[0][1] == results[1][1]
