"""Parameters that are not cut: one rank has all of one, and the optimizer state that goes with it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from models import Block, features
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import ModelError
from zeroshard.testing import RankPool, RunFailedError

SHARDED = (1, 2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Unknown(torch.optim.Optimizer):
    """Steps along the gradient divided by its norm over the whole parameter; state of another shape."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norms = self.state[parameter].setdefault("norms", torch.zeros(2))
                    norms[0] += parameter.grad.norm()
                    norms[1] += 1
                    parameter.add_(parameter.grad / norms[0], alpha=-group["lr"])


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {"gradient_clipping": 0, **more, "zero_optimization": zero}


def train(engine: Any, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        engine.backward(engine(features(step, 0, rank)))
        engine.step()


State = dict[str, tuple[tuple[int, ...], dict[str, tuple[int, ...]]]]


def shapes_of_state(rank: int, world: int, stage: int, section: dict[str, Any]) -> tuple[State, State]:
    """By place in the groups of a parameter that this rank owns an element of: its slice's shape and those of its
    state. Then the same of the whole parameters."""
    torch.manual_seed(0)
    model = Net()
    named = list(model.named_parameters())
    whole: State = {name: (tuple(parameter.shape), {}) for name, parameter in named}
    optimizer = Unknown(model.parameters()) if not section else None
    settings = config(
        stage, **({"optimizer": section} if section else {"zero_allow_untested_optimizer": True})
    )
    engine, made, _, _ = zeroshard.initialize(model=model, optimizer=optimizer, config=settings)
    train(engine, rank)
    by_shape: State = {}
    for number, group in enumerate(made.param_groups):
        for place, part in enumerate(group["params"]):
            held = {key: tuple(value.shape) for key, value in made.state.get(part, {}).items() if value.dim()}
            if part.numel() or held:
                by_shape[f"{number}.{place}"] = (tuple(part.shape), held)
    engine.close()
    return by_shape, whole


def _matrices(state: State) -> State:
    return {name: of for name, of in state.items() if len(of[0]) == 2}


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({"type": "Muon", "params": {"lr": 1e-3}}, {"momentum_buffer", "exp_avg", "exp_avg_sq"}),
        ({"type": "Lamb", "params": {"lr": 1e-3}}, {"exp_avg", "exp_avg_sq"}),
        ({"type": "Adafactor", "params": {}}, {"row_var", "col_var", "variance"}),
        ({}, {"norms"}),
    ],
    ids=["Muon", "Lamb", "Adafactor", "untested"],
)
@pytest.mark.parametrize("stage", SHARDED)
def test_state_of_whole_parameters_is_on_one_rank(
    ranks2: RankPool, stage: int, section: dict[str, Any], kept: set[str]
) -> None:
    found = ranks2.run(shapes_of_state, stage, section)
    (first, whole), (second, _) = found
    owned = [_matrices(first), _matrices(second)]
    assert not set(owned[0]) & set(owned[1])
    if section.get("type") != "Muon":  # whose vectors are AdamW's, and may be cut
        assert not set(first) & set(second)
        assert len(first) + len(second) == len(whole)
    shapes = [shape for held in owned for shape, _ in held.values()]
    assert sorted(shapes) == sorted(shape for shape, _ in _matrices(whole).values())
    assert owned[0]  # not all on one rank: the longest first, to whom has least
    assert owned[1]
    states = {key for held in (first, second) for _, state in held.values() for key in state}
    assert states == kept
    for shape, state in [*owned[0].values(), *owned[1].values()]:
        assert state
        for key, of in state.items():
            expected = {"row_var": (shape[0], 1), "col_var": (1, shape[1]), "norms": (2,)}.get(key, shape)
            assert of == expected


def gathers_of_split_modules(rank: int, world: int) -> int:
    """Under Muon a Linear's weight and bias are in buckets of different kinds, and one operation reads both."""
    muon = {"type": "Muon", "params": {"lr": 1e-3}}
    for _ in range(12):
        engine, _, _, _ = zeroshard.initialize(model=Net(), config=config(3, optimizer=muon))
        train(engine, rank, steps=1)
        engine.close()
    return rank


def test_ranks_agree_on_the_order_of_buckets_that_one_operation_reads(ranks2: RankPool) -> None:
    """Where the order was that of memory addresses, one run in four had ranks gather different buckets."""
    assert ranks2.run(gathers_of_split_modules) == [0, 1]


def existing_state(rank: int, world: int, stage: int, name: str) -> tuple[float, int]:
    """An optimizer that has stepped before `initialize`: distance to the same over a plain model, and how many
    parameters have state here after it."""
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    optimizers: list[Any] = []
    for net in (reference, model):
        if name == "Adafactor":
            optimizer: Any = torch.optim.Adafactor(net.parameters(), lr=1e-2)
        else:
            optimizer = Unknown(net.parameters())
        net(features(9, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizers.append(optimizer)
    settings = config(stage, zero_allow_untested_optimizer=True)
    engine, made, _, _ = zeroshard.initialize(model=model, optimizer=optimizers[1], config=settings)
    held = sum(bool(state) for state in made.state.values())
    train(engine, rank, steps=3)
    for step in range(3):
        for other in range(world):
            (reference(features(step, 0, other)) / world).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    engine.close()
    both = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in both), held


@pytest.mark.parametrize("name", ["Adafactor", "Unknown"])
@pytest.mark.parametrize("stage", [0, *SHARDED])
def test_state_from_before_goes_to_the_owner(ranks2: RankPool, stage: int, name: str) -> None:
    found = ranks2.run(existing_state, stage, name)
    assert max(distance for distance, _ in found) <= 1e-6
    count = len(list(Net().parameters()))
    assert sum(held for _, held in found) == (2 * count if stage == 0 else count)


def refused(rank: int, world: int) -> None:
    model = Net()
    zeroshard.initialize(model=model, optimizer=Unknown(model.parameters()), config=config(1))


def test_an_untested_optimizer_is_refused_unless_allowed(ranks2: RankPool) -> None:
    with pytest.raises(
        RunFailedError, match="optimizer Unknown is not known to work element by element"
    ) as error:
        ranks2.run(refused)
    assert isinstance(error.value.__cause__, ModelError)


def warned(rank: int, world: int) -> str:
    """What is logged when it is allowed."""
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    keep = Keep()
    logging.getLogger("zeroshard").addHandler(keep)
    try:
        model = Net()
        settings = config(2, zero_allow_untested_optimizer=True)
        engine, _, _, _ = zeroshard.initialize(
            model=model, optimizer=Unknown(model.parameters()), config=settings
        )
        engine.close()
    finally:
        logging.getLogger("zeroshard").removeHandler(keep)
    return "\n".join(records)


def test_an_untested_optimizer_that_is_allowed_is_named(ranks2: RankPool) -> None:
    assert "optimizer Unknown is untested: each parameter is kept whole on one rank" in ranks2.run(warned)[0]
