"""Bytes per rank equal the ZeRO formulas plus the padding the layout states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Block, features
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zeroshard
from zeroshard.assembly import build_engine
from zeroshard.comm import FakeCollectives
from zeroshard.config import parse, resolve_batch
from zeroshard.materialize import Groups
from zeroshard.optimizer import COUNTERS, ELEMENTWISE, WHOLE
from zeroshard.testing import RankPool


class Stack(nn.Module):
    """`layers` feed-forward blocks of one width, no biases to speak of."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def formula(stage: int, parameters: int, world: int) -> dict[str, float]:
    """ZeRO's bytes per rank: bf16 parameters and gradients, fp32 master, Adam, no accumulation."""
    return {
        "parameters": 2 * parameters / (world if stage == 3 else 1),
        "gradients": 2 * parameters / (world if stage >= 2 else 1),
        "master": 4 * parameters / (world if stage >= 1 else 1),
        "optimizer state": 8 * parameters / (world if stage >= 1 else 1),
    }


def config(stage: int) -> dict[str, Any]:
    return {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        },
    }


def measure(rank: int, world: int, stage: int) -> dict[str, Any]:
    model = Stack(6, 5, 3)
    engine, _, _, _ = zeroshard.initialize(model=model, config=config(stage))
    for step in range(3):
        engine.backward(engine(features(step, 0, rank)))
        engine.step()
    counted = {
        "parameters": sum((b.full if b.layout.resident else b.shard).nbytes for b in engine._states.buffers),
        "full buffers": sum(b.full.untyped_storage().nbytes() for b in engine._states.buffers),
        "optimizer state": sum(
            v.nbytes
            for s in engine.optimizer.state.values()
            for v in s.values()
            if torch.is_tensor(v) and v.dim()
        ),
    }
    result = {
        "elements": engine.layout.numel,
        "padding": engine.layout.padding,
        "predicted": dict(engine.predicted_memory().rows()),
        "measured": dict(engine.measured_memory().rows()),
        "counted": counted,
        "padding bytes": engine.predicted_memory().padding,
    }
    engine.close()
    return result


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_equal_the_formula_plus_padding(request: pytest.FixtureRequest, world: int, stage: int) -> None:
    pool: RankPool = request.getfixturevalue(f"ranks{world}")
    results = pool.run(measure, stage)
    for result in results:
        parameters, padding = result["elements"], result["padding"]
        padded = formula(stage, parameters + padding, world)
        measured, predicted = result["measured"], result["predicted"]
        for category in ("parameters", "gradients", "master"):
            assert measured[category] == padded[category] == predicted[category]
        assert measured["optimizer state"] == predicted["optimizer state"]
        assert measured["optimizer state"] == result["counted"]["optimizer state"]
        assert measured["parameters"] == result["counted"]["parameters"]
        assert result["counted"]["full buffers"] == (0 if stage == 3 else padded["parameters"])
        assert measured["gathered peak"] <= (predicted["gathered peak"] or 0)
        assert (
            measured["update peak"]
            == predicted["update peak"]
            == measured["gradients"] * (2 if stage >= 2 else 2 / world if stage else 2)
        )
        exact = formula(stage, parameters, world)["parameters"]
        assert result["padding bytes"] == pytest.approx(padded["parameters"] - exact, abs=len(results) * 8)
    states = sum(result["measured"]["optimizer state"] for result in results)
    assert states == 8 * results[0]["elements"] * (world if stage == 0 else 1)


class Scaled(nn.Module):
    """A parameter without dimensions, whose moments look like step counters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).square().mean()


def states_of_scaled(rank: int, world: int, stage: int, type_: str) -> tuple[int | None, int | None]:
    model = Scaled()
    optimizer = getattr(torch.optim, type_)(model.parameters())
    settings = {name: value for name, value in config(stage).items() if name != "optimizer"}
    engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine(features(0, 0, rank)))
    engine.step()
    states = engine.predicted_memory().optimizer_state, engine.measured_memory().optimizer_state
    engine.close()
    return states


@pytest.mark.parametrize("type_", ["AdamW", "NAdam"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_moments_of_a_parameter_without_dimensions_are_counted(
    ranks2: RankPool, stage: int, type_: str
) -> None:
    results = ranks2.run(states_of_scaled, stage, type_)
    for predicted, measured in results:
        assert predicted == measured
    assert sum(measured for _, measured in results) == 8 * 43 * (2 if stage == 0 else 1)


@pytest.mark.parametrize("name", [n for n in sorted(ELEMENTWISE | WHOLE) if hasattr(torch.optim, n)])
def test_counters_are_what_torch_keeps_once_per_parameter(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    entries = optimizer.state[parameter].items()
    assert {key for key, value in entries if torch.is_tensor(value) and not value.dim()} <= COUNTERS


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_a_model_of_7_5_billion_on_64_ranks(stage: int, gigabytes: float) -> None:
    """The figures of the ZeRO paper (figure 1), from the real engine under fake tensors."""
    world, rank = 64, 63
    with FakeTensorMode():
        model = Stack(4096, 16640, 55)
        sharded, alone = FakeCollectives(rank, world), FakeCollectives(0, 1)
        if stage == 0:
            groups = Groups(gather=alone, reduce=alone, replicate=sharded)
        else:
            groups = Groups(gather=sharded, reduce=sharded, replicate=alone)
        batch = resolve_batch(None, 1, None, world, "this test")
        engine = build_engine(model, parse(config(stage)), batch, groups, torch.device("cpu"))
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 4096)))
            engine.step()
        measured = dict(engine.measured_memory().rows())
        predicted = dict(engine.predicted_memory().rows())
    states = sum(bytes_ or 0 for name, bytes_ in measured.items() if not name.endswith("peak"))
    assert round(states / 1e9, 1) == gigabytes
    for category, expected in formula(stage, engine.layout.numel, world).items():
        assert measured[category] == pytest.approx(expected, rel=1e-3)  # padding
        assert predicted[category] == measured[category]
    if stage == 3:
        # Two blocks at a time: the one in use and the one that is coming.
        block = 2 * (engine.layout.numel + engine.layout.padding) // 55
        assert (measured["gathered peak"] or 0) <= 3 * block


def peaks(rank: int, world: int) -> list[tuple[int, int]]:
    """(measured, predicted) peak after each step, for units that end in the operation that reads their weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    engine, _, _, _ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"zero_optimization": {**zero, "stage3_prefetch_bucket_size": 0}},
    )
    found = []
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 40)).square().mean())
        engine.step()
        found.append((engine.executor.peak_gathered, engine.executor.paths.predicted_peak()))
    engine.close()
    return found


def test_one_layer_at_a_time_is_gathered(ranks2: RankPool) -> None:
    one_layer = 4 * 40 * 41
    for found in ranks2.run(peaks):
        for measured, predicted in found:
            assert measured == predicted <= one_layer + 256


def tiled(rank: int, world: int, kind: str, limit: int) -> dict[str, Any]:
    """Weights, what the optimizer saw and the peak of a few steps under a limit of `sub_group_size`."""
    torch.manual_seed(0)
    model = Stack(6, 5, 3)
    groups = [
        {"params": [*model.blocks[0].parameters()], "lr": 1e-2},
        {"params": [*model.blocks[1:].parameters()]},
    ]
    made = getattr(torch.optim, kind)(groups, lr=1e-3, **({} if kind == "SGD" else {"foreach": True}))
    zero = {**config(3)["zero_optimization"], "sub_group_size": limit}
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model, optimizer=made, config={"bf16": {"enabled": True}, "zero_optimization": zero}
    )
    listed, calls = optimizer.param_groups, []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(3):
        engine.backward(engine(features(step, 0, rank)))
        engine.step()
        scheduler.step()
        calls.append(optimizer.param_groups is listed and len(listed) == 2)
    result = {
        "weights": [engine.full_fp32(p) for p in model.parameters()],
        "owned": [part.numel() for group in listed for part in group["params"]],
        "whole again": calls,
        "peak": dict(engine.measured_memory().rows())["update peak"],
        "predicted": dict(engine.predicted_memory().rows())["update peak"],
    }
    engine.close()
    return result


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_sub_group_size_bounds_what_the_optimizer_takes_at_once(ranks2: RankPool, kind: str) -> None:
    """To the same bits: the update of a parameter does not see the others."""
    whole = ranks2.run(tiled, kind, 1_000_000_000)
    for limit in (1, 50):
        for expected, found in zip(whole, ranks2.run(tiled, kind, limit), strict=True):
            assert all(map(torch.equal, found["weights"], expected["weights"]))
            assert found["whole again"] == [True] * 3
            largest = max(found["owned"])
            assert 0 < found["peak"] <= 4 * (limit - 1 + largest)
            assert found["peak"] <= found["predicted"] < expected["predicted"] == expected["peak"]


def hooked(rank: int, world: int, limit: int) -> tuple[int, list[Tensor]]:
    """A hook of the user's on the step sees the groups and edits gradients: nothing is cut then."""
    torch.manual_seed(0)
    model = Stack(6, 5, 3)
    zero = {**config(3)["zero_optimization"], "sub_group_size": limit}
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={"bf16": {"enabled": True}, "zero_optimization": zero},
    )
    seen = []

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append(len(optimizer.param_groups))
        for part in optimizer.param_groups[0]["params"]:
            if part.grad is not None:
                part.grad.mul_(torch.arange(part.grad.numel()).view(part.shape) % 2)

    optimizer.register_step_pre_hook(halve)
    engine.backward(engine(features(0, 0, rank)))
    engine.step()
    weights = [engine.full_fp32(p) for p in model.parameters()]
    engine.close()
    return seen[0], weights


def test_step_hooks_see_whole_groups_and_their_edits_count(ranks2: RankPool) -> None:
    for (groups, found), (_, expected) in zip(ranks2.run(hooked, 1), ranks2.run(hooked, 10**9), strict=True):
        assert groups == 1
        assert all(map(torch.equal, found, expected))
