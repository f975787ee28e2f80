"""One model trained twice: under an engine on this rank's batches, and in plain PyTorch on everybody's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import Block
from torch import Tensor, nn

import zeroshard

STAGES = (0, 1, 2, 3)


def config(stage: int, **more: Any) -> dict[str, Any]:
    """Stage 3 with nothing kept: every gather and free happens."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    zero |= more.pop("zero", {})
    return {"gradient_clipping": 0, **more, "zero_optimization": zero}


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon above rounding, so that a gradient of almost nothing is no coin toss."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.5)


class Net(nn.Module):
    """Two blocks and two heads; `forward` picks the head. Odd sizes, so that shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(2))
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 1)])

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads[head](x)


@dataclass
class Pair:
    """The engine's side and the reference's side."""

    rank: int
    world: int
    engine: Any
    optimizer: Any
    model: Any
    reference: Any
    expected: torch.optim.Optimizer

    @staticmethod
    def of(
        rank: int,
        world: int,
        stage: int,
        model_fn: Callable[[], nn.Module] = Net,
        optimizer_fn: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
        seed: int = 0,
        **more: Any,
    ) -> Pair:
        torch.manual_seed(seed)
        reference = model_fn()
        model = copy.deepcopy(reference)
        engine, optimizer, _, _ = zeroshard.initialize(
            model=model, optimizer=optimizer_fn(model), config=config(stage, **more)
        )
        return Pair(rank, world, engine, optimizer, model, reference, optimizer_fn(reference))

    def everybody(self, loss_of: Callable[[Any, int], Tensor], factor: float = 1.0) -> None:
        """Backward of the reference's mean over all ranks of `loss_of(reference, rank)`, times `factor`."""
        for rank in range(self.world):
            (loss_of(self.reference, rank) * factor / self.world).backward()

    def update(self) -> None:
        """The reference's step."""
        self.expected.step()
        self.expected.zero_grad()

    def distance(self) -> float:
        """Largest absolute difference of any weight, by the fp32 values that are trained."""
        named = zip(self.model.parameters(), self.reference.parameters(), strict=True)
        pairs = [(zeroshard.safe_get_full_fp32_param(p), q) for p, q in named if q.numel()]
        return max(float((p - q).detach().abs().max()) for p, q in pairs)

    def finish(self) -> float:
        """Close the engine; largest absolute difference of any weight it leaves behind."""
        self.engine.close()
        both = zip(self.model.parameters(), self.reference.parameters(), strict=True)
        return max(float((p - q).detach().abs().max()) for p, q in both if p.numel())


def attempt(act: Callable[[], Any]) -> tuple[str, str]:
    """(class, message) of the error that `act` raises; ("nothing", "") when there is none."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""
