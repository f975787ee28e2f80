"""Real architectures of transformers under stage 3: trained as in plain PyTorch and at stage 0, with each gather
the schedule's own, and writing the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.testing import RankPool
from zeroshard.trace import Action, Kind

pytest.importorskip("transformers")
import zoo

WRITERS = {"llama", "qwen2", "gpt2", "mixtral", "t5", "whisper"}


def start(model: nn.Module, stage: int) -> Any:
    """Stage 3 with nothing kept and nothing resident: every gather and free happens."""
    knobs = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    settings = {"gradient_clipping": 0, "zero_optimization": {"stage": stage, **knobs}}
    engine, *_ = zeroshard.initialize(model=model, optimizer=momentum(model), config=settings)
    return engine


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(engine: Any, name: str, step: int, rank: int) -> float:
    loss = engine(**zoo.batch(name, step, rank)).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def train_plain(
    model: Any, optimizer: torch.optim.Optimizer, name: str, step: int, world: int
) -> list[float]:
    """The mean over the batches of all ranks; the loss of each."""
    losses = []
    for rank in range(world):
        loss = model(**zoo.batch(name, step, rank)).loss
        (loss / world).backward()
        losses.append(float(loss.detach()))
    optimizer.step()
    optimizer.zero_grad()
    return losses


def distance(engine: Any, reference: nn.Module) -> float:
    """Largest difference of a parameter, relative to its scale (see `zeroshard.testing.parity`)."""
    named = zip(engine.module.parameters(), reference.parameters(), strict=True)
    pairs = [(engine.full_fp32(p), q.detach()) for p, q in named]
    return max(float((p - q).abs().max()) / max(float(q.abs().max()), 0.02) for p, q in pairs)


def trained(rank: int, world: int, name: str) -> dict[str, Any]:
    reference = zoo.build(name)
    engines = [start(copy.deepcopy(reference), stage) for stage in (3, 0)]
    sharded = engines[0]
    expected = momentum(reference)
    found: dict[str, Any] = {"gathers": []}
    losses = []
    for step in range(3):
        with launches(sharded) as launched:
            ours = [train(engine, name, step, rank) for engine in engines]
        planned = [action.bucket for action in sharded.schedule.actions if action.kind is Kind.GATHER]
        found["gathers"].append((launched, planned))
        losses.append(abs(ours[0] - train_plain(reference, expected, name, step, world)[rank]))
        losses.append(abs(ours[0] - ours[1]))
    found["losses"] = max(losses)
    found["plain"], found["stage 0"] = (distance(sharded, other) for other in (reference, whole(engines[1])))
    found["divergences"] = sharded.executor.divergences
    for engine in engines:
        engine.close()
    return found


def whole(engine: Any) -> nn.Module:
    engine.close()
    module: nn.Module = engine.module
    return module


@contextmanager
def launches(engine: Any) -> Iterator[list[int]]:
    """The buckets whose all-gather is launched inside the block, in order."""
    launched: list[int] = []

    def look(action: Action) -> None:
        if action.kind is Kind.GATHER and not engine._states.buffers[action.bucket].is_live:
            launched.append(action.bucket)

    engine.executor.on_action = look
    yield launched
    engine.executor.on_action = None


@pytest.mark.parametrize("name", zoo.ZOO)
def test_training(ranks2: RankPool, name: str) -> None:
    for found in ranks2.run(trained, name):
        assert found["plain"] <= 1e-6
        assert found["stage 0"] <= 1e-6
        assert found["losses"] <= 1e-5
        assert found["divergences"] == 0
        for ran, planned in found["gathers"][1:]:
            assert ran == planned


def prompt(name: str, rank: int) -> Tensor:
    batch = zoo.batch(name, 7, rank)
    return batch["input_features"] if "input_features" in batch else batch["input_ids"]


def write(model: Any, name: str, rank: int, sampled: bool, new_tokens: int, **more: Any) -> list[list[int]]:
    """Two sequences."""
    torch.manual_seed(11 + rank)
    heat = {"temperature": 1.0} if sampled else {}
    ids = model.generate(prompt(name, rank), do_sample=sampled, max_new_tokens=new_tokens, **heat, **more)
    return ids.tolist()


def written(rank: int, world: int, name: str) -> dict[str, Any]:
    """Sharded, ranks with prompts and lengths of their own, in step with each other; and gathered once."""
    reference = zoo.build(name)
    engine = start(copy.deepcopy(reference), 3)
    model = engine.module
    length = 3 if rank == 0 else 6
    same = []

    expected = momentum(reference)
    train(engine, name, 0, rank)
    train_plain(reference, expected, name, 0, world)
    for sampled in (False, True):
        for net in (model, reference):
            net.eval()
        tokens = write(reference, name, rank, sampled, length)
        same.append(write(model, name, rank, sampled, length, synced_gpus=True) == tokens)
        with launches(engine) as once, engine.unwrap_for_generation() as unwrapped:
            same.append(write(unwrapped, name, rank, sampled, length) == tokens)
        for net in (model, reference):
            net.train()
    for step in (1, 2):
        train(engine, name, step, rank)
        train_plain(reference, expected, name, step, world)
    error = distance(engine, reference)
    held = any(buffer.is_live for buffer in engine._states.buffers)
    buckets = len(engine.layout.buckets)
    engine.close()
    return {"same": same, "error": error, "held": held, "once": once, "buckets": buckets}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_generation(ranks2: RankPool, name: str) -> None:
    for found in ranks2.run(written, name):
        assert found["same"] == [True] * 4
        assert found["once"] == list(range(found["buckets"]))
        assert found["error"] <= 1e-6
        assert not found["held"]
