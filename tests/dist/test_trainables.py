"""Frozen parameters cost nothing but themselves; `requires_grad` may change between steps, and means what it means in
plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Block, features
from pairs import STAGES, Pair, adamw, attempt
from torch import Tensor, nn

import zeroshard
from zeroshard.optimizers import Muon
from zeroshard.testing import RankPool

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
}
every_stage = pytest.mark.parametrize("stage", STAGES)


class Layers(nn.Module):
    """Blocks of which all but the second are frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(net: Any, step: int, at: int) -> Tensor:
    return net(features(step, 0, at)).float().square().mean()


def step(pair: Pair, number: int) -> None:
    pair.engine.backward(loss_of(pair.engine, number, pair.rank))
    pair.everybody(lambda net, at: loss_of(net, number, at))
    pair.engine.step()
    pair.update()


def toggle(pair: Pair, path: str, trains: bool) -> None:
    for net in (pair.model, pair.reference):
        net.get_submodule(path).requires_grad_(trains)


def states(pair: Pair) -> dict[str, list[str]]:
    """By parameter of the engine and of plain PyTorch: which optimizer state there is."""
    found = {}
    for name, parameter in pair.reference.named_parameters():
        found[name] = sorted(pair.expected.state.get(parameter, {}))
    return found


def toggled(rank: int, world: int, stage: int, precision: str, groups: str) -> float:
    """Blocks take turns; plain PyTorch does the same. Largest difference, also of the optimizer's state."""
    of_all = {"of all": adamw, "added": adamw_of_trainable}[groups]
    pair = Pair.of(rank, world, stage, Layers, of_all, **PRECISIONS[precision])
    worst = 0.0
    plan: dict[int, list[tuple[str, bool]]] = {
        3: [("blocks.1", False), ("blocks.2", True)],  # frozen at the start, and trains now
        6: [("blocks.1", True), ("blocks.2", False)],  # back: old state goes on
        8: [("blocks.0.up", True), ("blocks.2", True)],  # a part of a block; one that trained before
        10: [("blocks.0", True), ("head", False)],  # the rest of it
    }
    added: set[str] = {"blocks.1", "head"}
    for number in range(12):
        for path, trains in plan.get(number, []):
            toggle(pair, path, trains)
            new = path if path not in ("blocks.0",) else "blocks.0.norm"
            if groups == "added" and trains and new not in added:
                added.add(new)
                for net, optimizer in ((pair.model, pair.optimizer), (pair.reference, pair.expected)):
                    inside = list(net.get_submodule(new).parameters())
                    if new == "blocks.0.norm":
                        inside.append(net.blocks[0].down.weight)
                    optimizer.add_param_group({"params": inside, "lr": 3e-2})
        step(pair, number)
        worst = max(worst, pair.distance())
        for (name, ours), theirs in zip(
            pair.model.named_parameters(), pair.reference.parameters(), strict=True
        ):
            state = pair.expected.state.get(theirs)
            if not state:
                assert attempt(lambda p=ours: zeroshard.safe_get_full_optimizer_state(p, "exp_avg"))[0] == "StateError"
                continue
            moment = zeroshard.safe_get_full_optimizer_state(ours, "exp_avg")
            worst = max(worst, float((moment - state["exp_avg"]).abs().max()))
            assert float(zeroshard.safe_get_full_optimizer_state(ours, "step")) == float(state["step"]), name
    assert not any(b.is_live for b in pair.engine._states.buffers if not b.layout.resident)
    pair.engine.close()
    return worst


def adamw_of_trainable(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.5)


@pytest.mark.parametrize("groups", ["of all", "added"])
@every_stage
def test_requires_grad_between_steps(ranks2: RankPool, stage: int, groups: str) -> None:
    """E 58."""
    assert max(ranks2.run(toggled, stage, "fp32", groups)) <= 1e-6


@pytest.mark.parametrize("stage", [1, 3])
def test_requires_grad_between_steps_in_16_bit(ranks2: RankPool, stage: int) -> None:
    """The numbers are fp32's up to the rounding of the forward; a layer that did not train would be far off."""
    assert max(ranks2.run(toggled, stage, "bf16", "of all")) <= 3e-2
