"""Optimizers over whole parameters where everything comes together: groups that mix, tied, unused, frozen, empty
and 0-d parameters, accumulation, clipping, edits between steps."""

from __future__ import annotations

import copy

import pytest
import torch
from models import Block
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import StateError
from zeroshard.optimizers import Lamb, Muon, muon_groups
from zeroshard.testing import RankPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 12) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 3)
        self.sometimes = nn.Linear(8, 8)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, more: bool) -> Tensor:
        x = self.frozen(x)
        for block in self.blocks:
            x = block(x)
        x = x + self.sometimes(x) if more else x
        return (self.head(x) * self.factor).square().mean()


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "Lamb":
        groups = [{"params": parameters[::2], "lr": 1e-2, "weight_decay": 0.1}, {"params": parameters[1::2]}]
        return Lamb(groups)
    if name == "Muon":
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return Muon(muon_groups(parameters, names))
    return torch.optim.Adafactor(parameters, lr=1e-2)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + step * 100 + micro * 10 + rank)
    return torch.randn(4, 8, generator=generator)


def apart(rank: int, world: int, stage: int, name: str, threshold: int) -> tuple[float, bool]:
    """Largest difference from plain PyTorch after four steps; close() leaves the trained values in the module."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    zero = {"stage": stage, "stage3_param_persistence_threshold": threshold, "stage3_max_reuse_distance": 0}
    settings = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3, "zero_optimization": zero}
    engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer_of(name, model), config=settings)
    reference = optimizer_of(name, plain)
    for step in range(4):
        for micro in range(2):
            engine.backward(engine(batch(step, micro, rank), step % 2 == 1))
            engine.step()
            for other in range(world):
                (plain(batch(step, micro, other), step % 2 == 1) / world / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        reference.step()
        reference.zero_grad()
        if step == 1:
            editor = world - 1
            with engine.gathered(modifier_rank=editor), torch.no_grad():
                model.blocks[1].down.weight.mul_(2 if rank == editor else 1)
            zeroshard.safe_set_full_fp32_param(model.head.weight, torch.ones(3, 8))
            with torch.no_grad():
                plain.blocks[1].down.weight.mul_(2)
                plain.head.weight.fill_(1)
    found = [engine.full_fp32(parameter) for parameter in model.parameters()]
    engine.close()
    kept = all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))
    pairs = [(a, b.detach()) for a, b in zip(found, plain.parameters(), strict=True) if a.numel()]
    return max(float((a - b).abs().max()) for a, b in pairs), kept


@pytest.mark.parametrize("name", ["Lamb", "Muon", "Adafactor"])
@pytest.mark.parametrize(("stage", "threshold"), [(1, 0), (2, 0), (3, 0), (3, 30)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_whole_parameters_equal_plain_pytorch(
    request: pytest.FixtureRequest, ranks: int, stage: int, threshold: int, name: str
) -> None:
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    for distance, kept in pool.run(apart, stage, name, threshold):
        assert distance <= 1e-6
        assert kept


def state_of_one_rank(rank: int, world: int) -> list[str]:
    """What another rank's state is refused with, on all ranks; and a value of the wrong shape for it."""
    torch.manual_seed(0)
    settings = {"zero_optimization": {"stage": 2}}
    messages = []
    for name, key, value in (("Adafactor", "row_var", None), ("Lamb", "exp_avg", torch.ones(2, 2))):
        model = Net()
        engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer_of(name, model), config=settings)
        engine.backward(engine(batch(0, 0, rank), False))
        engine.step()
        weight = model.blocks[0].down.weight
        try:
            if value is None:
                zeroshard.safe_get_full_optimizer_state(weight, key)
            else:
                zeroshard.safe_set_full_optimizer_state(weight, value, key)
        except StateError as error:
            messages.append(str(error))
        engine.close()
    return messages


def test_state_that_cannot_be_read_or_set_is_an_error_on_all_ranks(ranks2: RankPool) -> None:
    found = ranks2.run(state_of_one_rank)
    read = {messages[0] for messages in found}
    assert any("has shape (8, 1), not the parameter's" in message for message in read)
    assert any("another rank cannot give state 'row_var'" in message for message in read)
    for _, set_ in found:
        assert "a value of shape (2, 2) for 'blocks.0.down.weight', whose shape is (8, 12)" in set_
