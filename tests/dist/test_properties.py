"""Whatever the model, the knobs and the loop: the weights after training are those of plain PyTorch.

hypothesis draws a `Plan` here, in the parent; it is a few numbers that pickle, and each rank builds model and
loop from it.
"""

from __future__ import annotations

import contextlib
import copy
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard.testing import FP32_TOLERANCE, RankPool
from zeroshard.testing.parity import SMALLEST_SCALE

EXAMPLES = int(os.environ.get("ZEROSHARD_EXAMPLES", "15"))
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one model looks like."""

    width: int
    blocks: tuple[str, ...]
    """Kinds of blocks, in a ModuleList: `mlp`, `norm`, `deep` (a list inside), `frozen`, `again` (the first
    block once more)."""
    hidden: int
    tied: bool
    unused: bool
    one: bool
    nothing: bool
    scale: bool
    recompute: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training run."""

    world: int
    shape: Shape
    stage: int
    zero: dict[str, int]
    accumulation: int
    clipping: float
    loop: str
    optimizer: str
    skipping: tuple[int, ...] = field(default=())
    """Steps in which the last block is left out."""


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x))


class Deep(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Mlp(width, hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return x


class Drawn(nn.Module):
    """The model of a `Shape`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.shape = shape
        self.embed = nn.Linear(3, width, bias=False)
        self.blocks = nn.ModuleList()
        for kind in shape.blocks:
            if kind == "again":
                self.blocks.append(self.blocks[0] if len(self.blocks) else Mlp(width, hidden))
            elif kind == "norm":
                self.blocks.append(Norm(width))
            elif kind == "deep":
                self.blocks.append(Deep(width, hidden))
            else:
                self.blocks.append(Mlp(width, hidden).requires_grad_(kind != "frozen"))
        self.head = nn.Linear(width, 3, bias=False)
        if shape.tied:
            self.head.weight = nn.Parameter(self.embed.weight.detach().t().clone())
            self.out = nn.Linear(width, 3, bias=False)
            self.out.weight = self.head.weight
        if shape.unused:
            self.spare = nn.Linear(width, 2)
        if shape.one:
            self.one = nn.Linear(width, 1)
        if shape.nothing:
            self.nothing = nn.Parameter(torch.zeros(0, 2))
        if shape.scale:
            self.scale = nn.Parameter(torch.full((), 0.5))

    def forward(self, x: Tensor, leave_out: bool = False) -> Tensor:
        x = self.embed(x)
        for block in self.blocks[:-1] if leave_out else self.blocks:
            if self.shape.recompute == "no":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.shape.recompute == "reentrant")
        result = self.head(x).square().mean()
        if self.shape.tied:
            result = result + self.out(torch.sin(x)).mean()
        if self.shape.one:
            result = result + self.one(x).abs().mean()
        return result * self.scale if self.shape.scale else result


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + step * 100 + micro * 10 + rank)
    return torch.randn(4, 3, generator=generator)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "blocks" in n], "lr": 1e-2, "weight_decay": 0.3},
        {"params": [p for n, p in named if "blocks" not in n], "lr": 1e-3},
    ]
    # An epsilon above rounding: the update of a gradient of nothing but rounding is no coin toss.
    return torch.optim.AdamW(groups, eps=1e-2)


def train_engine(engine: Any, optimizer: Any, plan: Plan, rank: int) -> None:
    for step in range(STEPS):
        leave_out = step in plan.skipping
        if plan.loop == "joined":  # all micro-batches in one graph, one backward
            losses = [engine(batch(step, m, rank), leave_out) for m in range(plan.accumulation)]
            (sum(losses) / plan.accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        for micro in range(plan.accumulation):
            local = plan.loop == "no_sync" and micro < plan.accumulation - 1
            with engine.no_sync() if local else contextlib.nullcontext():
                loss = engine(batch(step, micro, rank), leave_out)
                if plan.loop == "plain":
                    (loss / plan.accumulation).backward()
                else:
                    engine.backward(loss)
            if plan.loop != "plain":
                engine.step()
        if plan.loop == "plain":
            optimizer.step()
            optimizer.zero_grad()


def train_plain(model: nn.Module, plan: Plan) -> None:
    optimizer = optimizer_of(model, plan.optimizer)
    for step in range(STEPS):
        for micro in range(plan.accumulation):
            for rank in range(plan.world):
                loss = model(batch(step, micro, rank), step in plan.skipping)
                (loss / plan.accumulation / plan.world).backward()
        if plan.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clipping)
        optimizer.step()
        optimizer.zero_grad()


def run(rank: int, world: int, plan: Plan) -> tuple[str, float]:
    """(the parameter that differs most from plain PyTorch, by how much of its scale)."""
    torch.manual_seed(0)
    reference = Drawn(plan.shape)
    model = copy.deepcopy(reference)
    accumulation = 1 if plan.loop in ("plain", "joined") else plan.accumulation
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model,
        optimizer=optimizer_of(model, plan.optimizer),
        config={
            "gradient_clipping": plan.clipping,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": plan.stage, **plan.zero},
        },
    )
    train_engine(engine, optimizer, plan, rank)
    train_plain(reference, plan)
    executor = engine.executor
    executor.end_path()
    assert executor.peak_gathered <= executor.paths.predicted_peak()
    engine.close()
    worst = ("", 0.0)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if ours.numel():
            scale = max(float(theirs.detach().abs().max()), SMALLEST_SCALE)
            error = float((ours.detach() - theirs.detach()).abs().max()) / scale
            if not error <= worst[1]:
                worst = (name, error)
    return worst


shapes = st.builds(
    Shape,
    width=st.sampled_from([1, 4, 7]),
    blocks=st.lists(
        st.sampled_from(["mlp", "mlp", "norm", "deep", "frozen", "again"]), min_size=1, max_size=5
    ).map(tuple),
    hidden=st.sampled_from([1, 3, 8]),
    tied=st.booleans(),
    unused=st.booleans(),
    one=st.booleans(),
    nothing=st.booleans(),
    scale=st.booleans(),
    recompute=st.sampled_from(["no", "no", "plain", "reentrant"]),
)
knobs = st.fixed_dictionaries(
    {
        "stage3_param_persistence_threshold": st.sampled_from([0, 0, 8, 100_000]),
        "stage3_max_reuse_distance": st.sampled_from([0, 0, 60, 1_000_000]),
        "stage3_prefetch_bucket_size": st.sampled_from([0, 30, 1_000_000]),
    },
    optional={
        "reduce_bucket_size": st.sampled_from([1, 53, 1_000_000]),
        "stage3_max_live_parameters": st.sampled_from([1, 100, 1_000_000]),
    },
)
plans = st.builds(
    Plan,
    world=st.sampled_from([1, 2, 2, 3, 4]),
    shape=shapes,
    stage=st.sampled_from([0, 1, 2, 3, 3]),
    zero=knobs,
    accumulation=st.integers(1, 3),
    clipping=st.sampled_from([0.0, 0.1]),
    loop=st.sampled_from(["managed", "plain", "no_sync", "joined"]),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    skipping=st.sampled_from([(), (1,), (0, 2)]),
)


@pytest.fixture(scope="module")
def pools(ranks2: RankPool, ranks3: RankPool, ranks4: RankPool) -> Any:
    with RankPool(1) as alone:
        yield {1: alone, 2: ranks2, 3: ranks3, 4: ranks4}


@settings(
    max_examples=EXAMPLES,
    derandomize="ZEROSHARD_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plan=plans)
def test_any_training_is_that_of_plain_pytorch(pools: dict[int, RankPool], plan: Plan) -> None:
    for name, error in pools[plan.world].run(run, plan):
        assert error <= FP32_TOLERANCE, f"{name} differs by {error:.3g} of its scale"
