"""Ranks that really diverge: nobody hangs, and every rank's error says who is where, and why."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.errors import CommError
from zeroshard.testing.ranks import RankPool

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Equal blocks: what one rank gathers for another block has the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, route: Any = (0, 1, 2, 3)) -> torch.Tensor:
        for index in route:
            x = self.blocks[index](x)
        return x


def start(stage: int = 3, **zero: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    return zeroshard.initialize(model=Net(), config=config)[0]


def train(engine: Any, route: Any = (0, 1, 2, 3)) -> None:
    engine.backward(engine(torch.ones(2, WIDTH), route).square().mean())
    engine.step()


def called_thrice(engine: Any, rank: int) -> None:
    train(engine, (0, 1, 2, 3) if rank == 0 else (0, 1, 1, 1, 2, 3))


def fewer_batches(engine: Any, rank: int) -> None:
    for _ in range(3 if rank == 0 else 2):
        train(engine)
    if rank == 1:
        engine.close()


def frozen_on_one(engine: Any, rank: int) -> None:
    if rank == 1:
        engine.module.blocks[0].linear.requires_grad_(False)
    train(engine)


def gathered_on_one(engine: Any, rank: int) -> None:
    if rank == 0:
        with engine.gathered():
            torch.save(engine.module.state_dict(), os.devnull)
    train(engine)


def other_branch(engine: Any, rank: int) -> None:
    train(engine, (0, 1, 3) if rank == 0 else (0, 2, 3))


def shorter_generation(engine: Any, rank: int) -> None:
    engine.eval()
    with torch.no_grad():
        for _ in range(3 if rank == 0 else 6):
            engine(torch.ones(2, WIDTH))
    engine.train()
    train(engine)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Variables of this process, for the length of a test."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def run(rank: int, world: int, case: Callable[..., None], shared: bool) -> tuple[str, float]:
    with environment(ZEROSHARD_DEBUG="collectives", ZEROSHARD_SHARED_MEMORY=str(int(shared))):
        engine = start(stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
        train(engine)
        began = time.monotonic()
        try:
            case(engine, rank)
        except CommError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
        return "nothing was noticed", time.monotonic() - began


CASES = {
    called_thrice: ["'blocks.1' (blocks.1.linear.weight, blocks.1.linear.bias)", "on rank 1", "control flow"],
    fewer_batches: ["rank 1 left the loop earlier", "closes its engine", "same number of batches"],
    frozen_on_one: ["'blocks.0.linear.weight' and 1 more, frozen on rank 1 only"],
    gathered_on_one: ["only rank 0 called gathered()", "on every rank"],
    other_branch: ["of 'blocks.1'", "of 'blocks.2'", "first collective that differs", "control flow"],
    shorter_generation: ["without gradients was longer on rank 1", "engine.unwrap_for_generation()"],
}


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_told(ranks2: RankPool, case: Callable[..., None], shared: bool) -> None:
    for rank, (error, seconds) in enumerate(ranks2.run(run, case, shared)):
        print(error)
        assert error.startswith(f"DivergedError: rank {rank} ")
        for text in [
            "rank 0: waits in",
            "rank 1: waits in",
            "test_divergence.py:",
            "last one that matched: ",
        ]:
            assert text in error
        for text in CASES[case]:
            assert text in error, text
        assert seconds < 20  # one to two on an idle machine
