"""Small models with the shapes that break things: odd sizes, one element, none, tied, unused, shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard import checkpointing


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Odd(nn.Module):
    """Everything at once: tied head, a bias of 1 element, zero-size and unused parameters, a root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(7, 5) for _ in range(3))
        self.unused = nn.Linear(3, 3)
        self.nothing = nn.Parameter(torch.zeros(0))
        self.one = nn.Linear(7, 1)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(7))

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.hidden(tokens)
        return self.head(x).logsumexp(-1).mean() + self.one(x).square().mean()


class Checkpointed(Odd):
    """Blocks recomputed in backward; `how` is reentrant, plain or two (two blocks in one checkpoint)."""

    how = "plain"

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        if self.how == "two":
            pair = nn.Sequential(*self.blocks[:2])
            x = checkpoint(pair, x, use_reentrant=True)
            return checkpoint(self.blocks[2], x, use_reentrant=False)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


class CheckpointedReentrant(Checkpointed):
    how = "reentrant"


class CheckpointedPairs(Checkpointed):
    how = "two"


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
            return checkpointing.checkpoint(function, *args)
        return checkpoint(function, *args, use_reentrant=self.way == "reentrant")

    def part(self, x: Tensor, index: int) -> Tensor:
        return self.drop(self.blocks[index](x))

    def middle(self, x: Tensor) -> Tensor:
        for index in range(4):
            x = self.recompute(self.part, x, index)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x))).square().mean()


class External(nn.Module):
    """Weights used outside their own module, element-wise, as a view, and from another block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(2))
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x) + self.first.weight.sum(0)
        view = self.last.weight.t()  # a view that outlives the operation that touched the weight
        x = x @ view
        return (torch.nn.functional.linear(x, self.blocks[0].up.weight)).square().mean()


class GivesWeight(nn.Module):
    """A module that returns a view of its weight for its parent to use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self) -> Tensor:
        return self.weight.t()


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = GivesWeight()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.source()
        return (self.linear(x) @ weight).square().mean()


class Shared(nn.Module):
    """One block run several times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([Block(6, 5), Block(6, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 0, 1):
            x = self.block[index](x)
        return x.square().mean()


class SideOutput(nn.Module):
    """A block whose only gradient comes through an attribute, not through what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(2))
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = gate(x)
        aux = sum(gate.aux for gate in self.gates)
        return self.last(x).square().mean() + aux


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 6)
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.score(x).square().mean()
        return (x > 0).float() + x.detach()


class Frozen(nn.Module):
    """Frozen blocks with small trainable adapters, the first of which sees inputs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = Block(6, 5).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class ReentrantInside(nn.Module):
    """Blocks that recompute a part of themselves in a nested backward, between two plain uses of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sandwich() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class TwoInputs(nn.Module):
    """One recomputed encoder on two inputs: each nested backward completes its gradients anew."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(6, 5) for _ in range(2))

    def encode(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.clone().requires_grad_(), (-2 * x).requires_grad_()
        return (self.encode(first) - self.encode(second)).square().mean()


class Sandwich(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        x = checkpoint(self.linear, x, use_reentrant=True)
        return self.linear(torch.tanh(x))


def tokens(step: int, micro: int, rank: int) -> Tensor:
    """(4, 6) tokens below 11, different for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1 + step * 100 + micro * 10 + rank)
    return torch.randint(0, 11, (4, 6), generator=generator)


def features(step: int, micro: int, rank: int) -> Tensor:
    """(4, 6) normal values, different for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1 + step * 100 + micro * 10 + rank)
    return torch.randn(4, 6, generator=generator)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Blocks with a large rate and decay; the rest with a small rate and none."""
    inside = [p for name, p in model.named_parameters() if "blocks" in name]
    outside = [p for name, p in model.named_parameters() if "blocks" not in name]
    return torch.optim.AdamW(
        [
            {"params": inside, "lr": 1e-2, "weight_decay": 0.1},
            {"params": outside, "lr": 1e-3, "weight_decay": 0.0},
        ],
        lr=1e-3,
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
