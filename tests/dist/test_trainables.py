"""Frozen parameters cost nothing but themselves; `requires_grad` may change between steps, and means what it
means in plain PyTorch."""

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
                assert (
                    attempt(lambda p=ours: zeroshard.safe_get_full_optimizer_state(p, "exp_avg"))[0]
                    == "StateError"
                )
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


# ---- what frozen parameters cost -----------------------------------------------------------------------------


def costs(rank: int, world: int, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of this rank by category, with one block trained and with all: predicted, which is what then exists."""
    pair = Pair.of(rank, world, stage, Layers, adamw, bf16={"enabled": True})
    engine = pair.engine

    def bills() -> tuple[dict[str, int], dict[str, int]]:
        rows = engine.memory()
        return {name: predicted for name, predicted, _ in rows}, {name: found for name, _, found in rows}

    for number in range(2):
        engine.backward(loss_of(engine, number, rank))
        engine.step()
    trained = {bucket.index for bucket in engine.layout.buckets if bucket.trainable}
    for buffer, gradient, slices in zip(
        engine._states.buffers, engine._states.gradients, engine._states.slices, strict=True
    ):
        if buffer.layout.index in trained:
            continue
        assert gradient is None
        assert buffer.master is None
        assert not any(part in pair.optimizer.state for part in slices)
    before, counted = bills()
    assert {**before, "gathered peak": 0} == {**counted, "gathered peak": 0}
    # All that is left, since at stages 0 to 2 it may be one bucket.
    pair.model.requires_grad_(True)
    for number in range(2):
        engine.backward(loss_of(engine, number, rank))
        engine.step()
    after, counted = bills()
    # Gradients are those of one backward: the most so far.
    assert {**after, "gathered peak": 0} == {**counted, "gathered peak": 0}
    engine.close()
    return before, after


@every_stage
def test_frozen_parameters_cost_their_weights_only(ranks2: RankPool, stage: int) -> None:
    for before, after in ranks2.run(costs, stage):
        assert after["parameters"] == before["parameters"]
        assert after["master"] > before["master"]
        assert after["optimizer state"] > before["optimizer state"]
        assert after["gradients"] > before["gradients"]


def freed(rank: int, world: int) -> list[int]:
    """The most bytes gathered at once in a step: at the start, and with blocks frozen and unfrozen later."""
    pair = Pair.of(rank, world, 3, Layers, adamw, zero={"stage3_prefetch_bucket_size": 0})
    found = []
    for path, trains in (("head", True), ("blocks.0", True), ("blocks.1", False), ("blocks.2", True)):
        pair.model.get_submodule(path).requires_grad_(trains)
        for number in range(2):  # by demand, and planned
            pair.engine.executor.peak_gathered = 0
            pair.engine.backward(loss_of(pair.engine, number, rank))
            pair.engine.step()
            found.append(pair.engine.executor.peak_gathered)
    sizes = [bucket.nbytes for bucket in pair.engine.layout.buckets]
    pair.engine.close()
    return [max(sizes), *found]


def test_weights_are_freed_whatever_trains(ranks2: RankPool) -> None:
    """Without prefetch: the block whose backward ends and the one whose begins."""
    for largest, *found in ranks2.run(freed):
        assert all(peak <= 2 * largest for peak in found), (largest, found)


# ---- mistakes ------------------------------------------------------------------------------------------------


def one_rank_only(rank: int, world: int, stage: int, threshold: int) -> str:
    zero = {"stage3_param_persistence_threshold": threshold}
    pair = Pair.of(rank, world, stage, Layers, adamw, zero=zero)
    step(pair, 0)
    if rank == 0:
        pair.model.blocks[0].requires_grad_(True)
    try:
        step(pair, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_unfrozen_on_one_rank_only() -> None:
    """E 58: both ranks stop within seconds, and the one that is alone with it says what it is about."""
    with RankPool(2) as pool:
        for stage, threshold in [(0, 0), (1, 0), (3, 0), (3, 10**6)]:
            alone, other = pool.run(one_rank_only, stage, threshold, timeout=20)
            assert alone.startswith(
                "StateError: parameter 'blocks.0.norm.weight' (5 in all) requires grad on this"
            )
            assert "alike on all ranks" in alone
            assert other != "nothing"


def frozen_on_one(rank: int, world: int, stage: int) -> tuple[str, float]:
    """Rank 1 freezes the head, which its backward runs through all the same; then that is put right."""
    pair = Pair.of(rank, world, stage, Layers, adamw)
    step(pair, 0)
    if rank == 1:
        pair.model.head.requires_grad_(False)
    pair.engine.backward(loss_of(pair.engine, 1, rank))
    told = attempt(pair.engine.step)[1]
    pair.model.head.requires_grad_(True)
    pair.engine.zero_grad()
    step(pair, 1)
    return told, pair.finish()


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_on_one_rank_only(ranks2: RankPool, stage: int) -> None:
    for rank, (told, worst) in enumerate(ranks2.run(frozen_on_one, stage)):
        assert "parameter 'head.weight' requires grad on 1 of 2 ranks" in told
        assert f"({'also' if rank == 0 else 'not'} on rank {rank})" in told
        assert worst < 1e-6


def different(rank: int, world: int, stage: int) -> list[tuple[str, str]]:
    """Each rank unfreezes another layer: all ranks say so, and after it is put right all goes on."""
    pair = Pair.of(rank, world, stage, Layers, adamw)
    pair.model.blocks[2 * rank].requires_grad_(True)
    found = [attempt(lambda: loss_of(pair.engine, 0, rank))]
    pair.model.blocks[2 * rank].requires_grad_(False)
    toggle(pair, "blocks.0", True)
    for number in range(2):
        step(pair, number)
    found.append(("distance", str(pair.finish())))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_unfreezes_another(ranks2: RankPool, stage: int) -> None:
    for (kind, message), (_, distance) in ranks2.run(different, stage):
        assert kind == "StateError"
        assert "'blocks.0.norm.weight' was unfrozen on 1 of 2 ranks" in message
        assert float(distance) <= 1e-6


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return Muon([{"params": matrices, "use_muon": True}], lr=0.01)


def groups(rank: int, world: int, stage: int) -> list[tuple[str, str]]:
    pair = Pair.of(rank, world, stage, Layers, adamw_of_trainable)
    engine, model, optimizer = pair.engine, pair.model, pair.optimizer
    found = []

    def stepped() -> None:
        engine.backward(loss_of(engine, 0, rank))
        engine.step()

    model.blocks[0].requires_grad_(True)
    found.append(attempt(stepped))  # in no group
    optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
    found.append(attempt(stepped))
    optimizer.add_param_group({"params": [model.head.weight]})  # a second time
    found.append(attempt(stepped))
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 3))]})  # somebody else's
    found.append(attempt(stepped))
    optimizer.param_groups.pop()
    optimizer.param_groups[0]["params"].append(model.blocks[2].up.weight)  # frozen, and stays so
    found.append(attempt(stepped))
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_groups_that_are_added(ranks2: RankPool, stage: int) -> None:
    for absent, fine, twice, foreign, frozen in ranks2.run(groups, stage):
        assert absent[0] == "StateError"
        assert "'blocks.0.norm.weight' was unfrozen after `initialize` and is in no group" in absent[1]
        assert "add_param_group" in absent[1]
        assert fine == frozen == ("nothing", "")
        assert twice[0] == "StateError"
        assert "group 2 got parameter 'head.weight', which it holds already" in twice[1]
        assert foreign[0] == "StateError"
        assert "shape (2, 3)) that this engine does not hold" in foreign[1]


class Cut(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6 * 11, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x).view(-1, 11, 6).sum(1))


def whole(rank: int, world: int) -> tuple[str, str]:
    pair = Pair.of(rank, world, 3, Cut, muon)
    pair.model.first.requires_grad_(True)

    def stepped() -> None:
        pair.engine.backward(loss_of(pair.engine, 0, rank))
        pair.engine.step()

    found = attempt(stepped)
    pair.engine.close()
    return found


def test_an_optimizer_of_whole_parameters(ranks2: RankPool) -> None:
    for kind, message in ranks2.run(whole):
        assert kind == "StateError"
        assert "cut between ranks, and Muon updates whole parameters" in message
