"""Activation checkpointing over sharded weights: the numbers of plain PyTorch, the gathers of the schedule, and
nothing kept alive. Both of torch's variants and `zeroshard.checkpointing`, in the shapes people give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, features
from pairs import STAGES, Pair
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

import zeroshard
from zeroshard.testing import RankPool
from zeroshard.trace import Action, Kind

WAYS = ("reentrant", "torch", "zeroshard")


class Recomputed(nn.Module):
    """Blocks with dropout, each in a checkpoint of its own. `way` None runs it plainly."""

    def __init__(self, way: str | None) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(4))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)

    def recompute(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        if self.way is None:
            return function(*args)
        if self.way == "zeroshard":
            return zeroshard.checkpointing.checkpoint(function, *args)
        return torch_checkpoint(function, *args, use_reentrant=self.way == "reentrant")

    def part(self, x: Tensor, index: int) -> Tensor:
        return self.drop(self.blocks[index](x))

    def middle(self, x: Tensor) -> Tensor:
        for index in range(4):
            x = self.recompute(self.part, x, index)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x))).square().mean()


class Nested(Recomputed):
    """Two checkpoints of two blocks each, which are checkpoints themselves."""

    def pair(self, x: Tensor, first: int) -> Tensor:
        return self.recompute(self.part, self.recompute(self.part, x, first), first + 1)

    def middle(self, x: Tensor) -> Tensor:
        return self.recompute(self.pair, self.recompute(self.pair, x, 0), 2)


class Externals(Recomputed):
    """Inside of the checkpoint: weights of modules that run outside of it, tied and as a view."""

    def part(self, x: Tensor, index: int) -> Tensor:
        x = torch.nn.functional.linear(self.blocks[index](x), self.embed.weight)
        return x + self.head.weight[0]


class InsideBlocks(Recomputed):
    """Blocks that recompute two parts of themselves, and not the rest."""

    def __init__(self, way: str | None) -> None:
        super().__init__(way)
        self.blocks = nn.ModuleList(Halves(self.recompute) for _ in range(4))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Halves(nn.Module):
    def __init__(self, recompute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(6)
        self.first = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6))
        self.second = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.recompute(self.first, self.norm(x))
        return x + self.recompute(self.second, x)


class FirstLayer(Recomputed):
    """The first checkpoint's input is integers, and its weights get gradients all the same."""

    def __init__(self, way: str | None) -> None:
        super().__init__(way)
        self.table = nn.Embedding(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        ids = (4 * x).long().abs().clamp(max=8)
        embedded = self.table(ids) if self.way == "reentrant" else self.recompute(self.table, ids)
        return self.head(self.middle(self.embed(embedded))).square().mean()


class FrozenNorms(Recomputed):
    """Frozen norms under trainable linears, in bf16 a classic for errors about the metadata of saved tensors."""

    def __init__(self, way: str | None) -> None:
        super().__init__(way)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6).requires_grad_(False), nn.Linear(6, 6)) for _ in range(4)
        )


CASES: dict[type[Recomputed], int] = {
    Recomputed: 11,  # 6 buckets, in forward and in backward, and the head once for both
    Nested: 13,  # the outer recomputation runs through the first of each pair before its own turn comes
    Externals: 12,  # the head (pinned by the view) and the embedding once more: they are used all over
    InsideBlocks: 11,
    FirstLayer: 13,  # one bucket more
    FrozenNorms: 23,  # 10 buckets, two to a block; with a reuse distance of 0 one of them goes between f and B
}
"""Gathers of a step at stage 3 with nothing kept, without checkpoints or with."""


def train(
    rank: int, world: int, case: type[Recomputed], way: str, stage: int, micro: int = 1
) -> tuple[float, int, list[str]]:
    """Largest difference from plain PyTorch; gathers of the last step; what is live after a backward."""
    pair = Pair.of(rank, world, stage, lambda: case(way), gradient_accumulation_steps=micro)
    pair.reference.way = None
    executor = pair.engine.executor
    for step in range(3):
        seen: list[Action] = []
        executor.on_action = seen.append
        for index in range(micro):
            torch.manual_seed(10 * step + index)
            pair.engine.backward(pair.engine(features(step, index, rank)))
            live = [b.layout.name for b in pair.engine._states.buffers if b.is_live and not b.layout.resident]
            pair.engine.step()
            for other in range(world):
                torch.manual_seed(10 * step + index)
                (pair.reference(features(step, index, other)) / world / micro).backward()
        pair.update()
    executor.on_action = None
    executor.end_path()
    assert executor.divergences == 0
    assert executor.peak_gathered == executor.paths.predicted_peak()
    return pair.finish(), sum(action.kind is Kind.GATHER for action in seen), live


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_equal_to_plain_pytorch_in_the_gathers_of_the_schedule(
    ranks2: RankPool, case: type[Recomputed], way: str
) -> None:
    for error, gathers, live in ranks2.run(train, case, way, 3):
        assert error <= 1e-6
        assert gathers <= CASES[case]
        assert live == (["head"] if case is Externals else [])  # a view went where nobody can follow it


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_with_accumulation(ranks2: RankPool, stage: int, way: str) -> None:
    assert max(error for error, _, _ in ranks2.run(train, Nested, way, stage, 2)) <= 1e-6


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def in_16_bits(rank: int, world: int, case: type[Recomputed], precision: str) -> None:
    """The same bits with and without checkpoints, also where recomputation does not stop early."""
    results = []
    for way in (None, *WAYS, "late"):
        pair = Pair.of(
            rank, world, 3, lambda way=way: case("torch" if way == "late" else way), **PRECISIONS[precision]
        )
        for step in range(3):
            torch.manual_seed(step)
            with set_checkpoint_early_stop(way != "late"):
                pair.engine.backward(pair.engine(features(step, 0, rank)))
            assert not any(b.is_live for b in pair.engine._states.buffers if not b.layout.resident)
            pair.engine.step()
        pair.engine.close()
        results.append(list(pair.model.parameters()))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", [Recomputed, FrozenNorms], ids=lambda case: case.__name__)
def test_the_same_bits_in_16_bit(ranks2: RankPool, case: type[Recomputed], precision: str) -> None:
    ranks2.run(in_16_bits, case, precision)
