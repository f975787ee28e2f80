"""Reading and editing gradients, fp32 values and optimizer state by parameter: at every stage what plain PyTorch
has at that moment, and what is set is what counts from then on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import features
from pairs import STAGES, Net, Pair, adamw, attempt
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import ShardedAccessError, StateError
from zeroshard.testing import RankPool

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}, "communication_data_type": "fp32"},
}
every_stage = pytest.mark.parametrize("stage", STAGES)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


class Tail(Net):
    """A scale of one element and a tensor without any besides, so that ranks own nothing of some parameters;
    `unused` gets no gradient on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return super().forward(x, head) * self.gain


def loss_of(net: Any, step: int, at: int) -> Tensor:
    return net(features(step, 0, at)).float().square().mean()


def largest(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


def values(rank: int, world: int, stage: int, precision: str) -> dict[str, float]:
    """Largest difference of each kind of value from plain fp32 PyTorch, over two steps."""
    pair = Pair.of(rank, world, stage, Tail, adamw, **PRECISIONS[precision])
    worst = dict.fromkeys(("fp32", "gradient", "exp_avg", "exp_avg_sq", "local"), 0.0)

    def note(kind: str, found: Tensor | None, expected: Tensor) -> None:
        assert found is not None
        assert found.dtype is torch.float32
        worst[kind] = max(worst[kind], largest(found, expected))

    for step in range(2):
        pair.engine.backward(loss_of(pair.engine, step, rank))
        pair.everybody(lambda net, at, s=step: loss_of(net, s, at))
        named = list(zip(pair.model.named_parameters(), pair.reference.parameters(), strict=True))
        for (name, ours), theirs in named:
            gradient = zeroshard.safe_get_full_grad(ours)
            if theirs.grad is None:
                assert gradient is None, name
                assert zeroshard.safe_get_local_grad(ours) is None
                continue
            note("gradient", gradient, theirs.grad)
            local = zeroshard.safe_get_local_grad(ours)
            total = gather(local, ours)
            note("local", total, theirs.grad)
        pair.engine.step()
        pair.update()
        for (name, ours), theirs in named:
            note("fp32", zeroshard.safe_get_full_fp32_param(ours), theirs.detach())
            note("local", gather(zeroshard.safe_get_local_fp32_param(ours), ours), theirs.detach())
            if name.startswith(("unused", "heads.1", "nothing")):
                continue
            for key in ("exp_avg", "exp_avg_sq"):
                note(
                    key, zeroshard.safe_get_full_optimizer_state(ours, key), pair.expected.state[theirs][key]
                )
                local = zeroshard.safe_get_local_optimizer_state(ours, key)
                note("local", gather(local, ours), pair.expected.state[theirs][key])
            assert float(zeroshard.safe_get_full_optimizer_state(ours, "step")) == step + 1
    pair.engine.close()
    return worst


def gather(local: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """The local pieces of all ranks end to end, in the parameter's shape. Copies of it, where all own all."""
    assert local is not None
    assert local.dim() == 1 or local.shape == parameter.shape
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, local.detach().reshape(-1).clone())
    if all(piece.numel() == parameter.numel() for piece in found):
        return found[0].view(parameter.shape)
    return torch.cat(found).view(parameter.shape)


@every_precision
@every_stage
def test_values_are_those_of_plain_pytorch(ranks2: RankPool, stage: int, precision: str) -> None:
    # 16-bit compute rounds what fp32 does not; this tells a wrong scale or a missing average from that.
    limit = 1e-6 if precision == "fp32" else 2e-2
    for worst in ranks2.run(values, stage, precision):
        assert all(error <= limit for error in worst.values()), worst


def between_backwards(rank: int, world: int, stage: int, how: str) -> float:
    """The gradient is readable in the middle of a window too, also under `no_sync`; reading changes nothing."""
    pair = Pair.of(rank, world, stage, gradient_accumulation_steps=3)
    weight, other = pair.model.blocks[0].up.weight, pair.reference.blocks[0].up.weight
    worst = 0.0
    for step in range(2):
        for micro in range(3):
            if how == "no_sync" and micro < 2:
                with pair.engine.no_sync():
                    pair.engine.backward(loss_of(pair.engine, 3 * step + micro, rank))
            else:
                pair.engine.backward(loss_of(pair.engine, 3 * step + micro, rank))
            pair.everybody(lambda net, at, s=3 * step + micro: loss_of(net, s, at), factor=1 / 3)
            gradient = zeroshard.safe_get_full_grad(weight)
            worst = max(worst, largest(gradient, other.grad))
            pair.engine.step()
        pair.update()
    return max(worst, pair.finish())


@pytest.mark.parametrize("how", ["counted", "no_sync"])
@every_stage
def test_a_gradient_in_the_middle_of_a_window(ranks2: RankPool, stage: int, how: str) -> None:
    assert max(ranks2.run(between_backwards, stage, how)) <= 1e-6


def edits(rank: int, world: int, stage: int, precision: str, how: str) -> None:
    """An fp32 value that is set: read back, in the compute copy at once, and still there after a step of lr 0."""
    pair = Pair.of(rank, world, stage, Tail, **PRECISIONS[precision])
    engine, model = pair.engine, pair.model
    for group in pair.optimizer.param_groups:
        group["lr"] = 0.0
    for turn, parameter in enumerate([model.blocks[0].up.weight, model.heads[0].bias, model.gain]):
        others = {n: engine.full_fp32(p) for n, p in model.named_parameters() if p is not parameter}
        # Values that 16 bits do not hold: the fp32 form is exact.
        value = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape) / 3 + turn
        if how == "full":
            zeroshard.safe_set_full_fp32_param(parameter, value)
        elif how == "local":
            local = zeroshard.safe_get_local_fp32_param(parameter)
            zeroshard.safe_set_local_fp32_param(parameter, own_part(local, parameter, value))
        else:
            value = value.to(parameter.dtype).float()
            with engine.gathered(parameter, modifier_rank=1), torch.no_grad():
                parameter.copy_(value if rank == 1 else torch.full_like(value, 99.0))
        for step in range(2):
            assert torch.equal(engine.full_fp32(parameter), value)
            with engine.gathered(parameter):
                assert torch.equal(parameter, value.to(parameter.dtype))
            engine.backward(loss_of(engine, step, rank))
            engine.step()
        assert all(
            torch.equal(engine.full_fp32(p), others[n]) for n, p in model.named_parameters() if n in others
        )
    engine.close()


def own_part(local: Tensor | None, parameter: nn.Parameter, value: Tensor) -> Tensor:
    """The part of `value` that belongs to this rank, by what all own."""
    assert local is not None
    sizes = sizes_of(local)
    if all(size == parameter.numel() for size in sizes):
        return value.reshape(-1)
    rank = torch.distributed.get_rank()
    start = sum(sizes[:rank])
    return value.reshape(-1)[start : start + sizes[rank]]


def sizes_of(local: Tensor) -> list[int]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, local.numel())
    return found


@pytest.mark.parametrize("how", ["full", "local", "gathered"])
@every_precision
@every_stage
def test_an_edit_of_a_weight_stays(ranks2: RankPool, stage: int, precision: str, how: str) -> None:
    ranks2.run(edits, stage, precision, how)


def edited_gradients(rank: int, world: int, stage: int, precision: str, how: str) -> float:
    """A step by gradients that were set: one replaced, one scaled, one given to a parameter that had none."""
    pair = Pair.of(rank, world, stage, Tail, sgd, **PRECISIONS[precision])
    engine, model = pair.engine, pair.model
    engine.backward(loss_of(engine, 0, rank))
    given = {"blocks.0.up.weight": 0.25, "gain": -2.0, "unused.bias": 1.0}
    before = {name: engine.full_fp32(p) for name, p in model.named_parameters()}
    for name, number in given.items():
        parameter = model.get_parameter(name)
        value = torch.full(parameter.shape, number) + torch.arange(parameter.numel()).view(parameter.shape)
        if how == "full" or name == "unused.bias":
            zeroshard.safe_set_full_grad(parameter, value)
        else:
            local = zeroshard.safe_get_local_grad(parameter)
            zeroshard.safe_set_local_grad(parameter, own_part(local, parameter, value))
        assert torch.equal(zeroshard.safe_get_full_grad(parameter), value)
    gradients = {name: zeroshard.safe_get_full_grad(p) for name, p in model.named_parameters()}
    result = engine.step()
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values() if g is not None))
    assert abs(result.grad_norm - norm) <= 1e-6 * norm
    worst = 0.0
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        expected = before[name] if gradient is None else before[name] - 0.1 * gradient
        worst = max(worst, largest(engine.full_fp32(parameter), expected))
    assert gradients["unused.weight"] is None
    engine.close()
    return worst


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("how", ["full", "local"])
@every_precision
@every_stage
def test_a_gradient_that_is_set_is_the_one_that_counts(
    ranks2: RankPool, stage: int, precision: str, how: str
) -> None:
    assert max(ranks2.run(edited_gradients, stage, precision, how)) <= 1e-6


def edited_state(rank: int, world: int, stage: int, how: str) -> float:
    """Moments and the step count that are set go into the next step as in plain PyTorch."""
    pair = Pair.of(rank, world, stage, Tail, adamw)
    for step in range(3):
        pair.engine.backward(loss_of(pair.engine, step, rank))
        pair.engine.step()
        pair.everybody(lambda net, at, s=step: loss_of(net, s, at))
        pair.update()
        if step == 2:
            break
        for name in ("blocks.1.down.weight", "gain"):
            ours, theirs = pair.model.get_parameter(name), pair.reference.get_parameter(name)
            for number, key in enumerate(("exp_avg", "exp_avg_sq")):
                value = torch.arange(ours.numel()).view(ours.shape) * 0.01 + number + 0.1
                pair.expected.state[theirs][key].copy_(value)
                if how == "full":
                    zeroshard.safe_set_full_optimizer_state(ours, value, key)
                else:
                    local = zeroshard.safe_get_local_optimizer_state(ours, key)
                    part = own_part(local, ours, value)
                    zeroshard.safe_set_local_optimizer_state(ours, part, key)
                assert torch.equal(zeroshard.safe_get_full_optimizer_state(ours, key), value)
            if how == "full":
                zeroshard.safe_set_full_optimizer_state(ours, torch.tensor(5.0), "step")
                pair.expected.state[theirs]["step"].fill_(5.0)
                assert float(zeroshard.safe_get_full_optimizer_state(ours, "step")) == 5.0
    return pair.finish()


@pytest.mark.parametrize("how", ["full", "local"])
@every_stage
def test_state_that_is_set_goes_on(ranks2: RankPool, stage: int, how: str) -> None:
    assert max(ranks2.run(edited_state, stage, how)) <= 1e-6


def before_the_first_step(rank: int, world: int, stage: int) -> list[tuple[str, str]]:
    """Nothing to read yet, of parameters with one element too, of which a rank owns none."""
    pair = Pair.of(rank, world, stage, Tail, adamw)
    found = []
    for parameter in (pair.model.blocks[0].up.weight, pair.model.gain, pair.model.nothing):
        for act in (
            lambda p=parameter: zeroshard.safe_get_full_optimizer_state(p, "exp_avg"),
            lambda p=parameter: zeroshard.safe_set_full_optimizer_state(p, torch.zeros(p.shape), "exp_avg"),
        ):
            found.append(attempt(act))
        assert zeroshard.safe_get_full_grad(parameter) is None
        assert zeroshard.safe_get_local_grad(parameter) is None
    # Still working, and readable after the step.
    pair.engine.backward(loss_of(pair.engine, 0, rank))
    pair.engine.step()
    assert zeroshard.safe_get_full_optimizer_state(pair.model.gain, "exp_avg") is not None
    found.append(attempt(lambda: zeroshard.safe_get_full_optimizer_state(pair.model.gain, "momentum")))
    found.append(
        attempt(lambda: zeroshard.safe_get_full_optimizer_state(pair.model.unused.weight, "exp_avg"))
    )
    pair.engine.close()
    return found


@every_stage
def test_state_that_is_not_there_is_an_error_on_all_ranks(ranks4: RankPool, stage: int) -> None:
    for found in ranks4.run(before_the_first_step, stage):
        assert [kind for kind, _ in found] == ["StateError"] * len(found), found
        assert all("made by the first step" in message for _, message in found[:-2])
        assert "'momentum'" in found[-2][1]
        assert "'gain'" in found[-2][1]
        assert "'unused.weight'" in found[-1][1]


def wrong_values(rank: int, world: int, stage: int) -> list[tuple[str, str]]:
    pair = Pair.of(rank, world, stage, Tail, adamw)
    weight = pair.model.blocks[0].up.weight
    frozen = nn.Parameter(torch.ones(2))
    pair.engine.backward(loss_of(pair.engine, 0, rank))
    found = [
        attempt(lambda: zeroshard.safe_set_full_fp32_param(weight, torch.zeros(6, 5))),
        attempt(lambda: zeroshard.safe_set_full_grad(weight, torch.zeros(30))),
        attempt(lambda: zeroshard.safe_set_local_fp32_param(weight, torch.zeros(31))),
        attempt(lambda: zeroshard.safe_set_local_grad(weight, torch.zeros(31))),
        attempt(lambda: zeroshard.safe_set_local_grad(pair.model.unused.bias, torch.zeros(2))),
    ]
    assert zeroshard.safe_get_full_fp32_param(frozen) is None
    assert zeroshard.safe_get_full_grad(frozen) is None
    for wrong in ("blocks.0.up.weight", pair.model.blocks[0]):
        kind, message = attempt(lambda w=wrong: zeroshard.safe_get_full_fp32_param(w))
        assert kind == "ShardedAccessError"
        assert type(wrong).__name__ in message
    pair.engine.step()
    found += [
        attempt(lambda: zeroshard.safe_set_full_optimizer_state(weight, torch.zeros(30), "exp_avg")),
        attempt(lambda: zeroshard.safe_set_full_optimizer_state(weight, torch.zeros(5, 6), "step")),
    ]
    pair.engine.close()
    return found


@every_stage
def test_values_that_do_not_fit(ranks2: RankPool, stage: int) -> None:
    for found in ranks2.run(wrong_values, stage):
        assert [kind for kind, _ in found] == ["StateError"] * len(found), found
        assert all("'blocks.0.up.weight'" in message or "'unused.bias'" in message for _, message in found)


class HalfFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


def frozen(rank: int, world: int, stage: int, precision: str) -> list[tuple[str, str]]:
    """A frozen parameter has a value to read and to set, and neither gradient nor state."""
    pair = Pair.of(rank, world, stage, HalfFrozen, adamw, **PRECISIONS[precision])
    weight = pair.model.blocks[0].up.weight
    pair.engine.backward(loss_of(pair.engine, 0, rank))
    found = [
        attempt(lambda: zeroshard.safe_get_full_grad(weight)),
        attempt(lambda: zeroshard.safe_get_local_grad(weight)),
        attempt(lambda: zeroshard.safe_get_full_optimizer_state(weight, "exp_avg")),
    ]
    value = torch.arange(30.0).view(5, 6) / 4
    zeroshard.safe_set_full_fp32_param(weight, value)
    pair.engine.step()
    assert torch.equal(zeroshard.safe_get_full_fp32_param(weight).float(), value)
    with pair.engine.gathered(weight):
        assert torch.equal(weight.float(), value)
    pair.engine.close()
    return found


@every_precision
@every_stage
def test_frozen_parameters(ranks2: RankPool, stage: int, precision: str) -> None:
    for found in ranks2.run(frozen, stage, precision):
        assert [kind for kind, _ in found] == ["StateError"] * 3
        assert all("'blocks.0.up.weight' is not trained" in message for _, message in found)


def scaled_moments(rank: int, world: int, stage: int) -> float:
    """The gradient of fp16 is shown without its scale, whatever the scale."""
    seen = []
    for power in (4, 12):
        fp16 = {"enabled": True, "initial_scale_power": power}
        pair = Pair.of(rank, world, stage, Tail, sgd, fp16=fp16, communication_data_type="fp32")
        pair.engine.backward(loss_of(pair.engine, 0, rank))
        seen.append(zeroshard.safe_get_full_grad(pair.model.heads[0].weight))
        pair.engine.close()
    return float((seen[0] - seen[1]).abs().max() / seen[0].abs().max())


@every_stage
def test_gradients_are_shown_without_the_loss_scale(ranks2: RankPool, stage: int) -> None:
    assert max(ranks2.run(scaled_moments, stage)) <= 2e-3


def exchanged(rank: int, world: int, stage: int, precision: str) -> None:
    """`.data = ...` inside of `gathered` is an edit like one in place."""
    pair = Pair.of(rank, world, stage, Net, **PRECISIONS[precision])
    engine, parameter = pair.engine, pair.model.blocks[0].up.weight
    others = {n: engine.full_fp32(p) for n, p in pair.model.named_parameters() if p is not parameter}
    value = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape)
    with engine.gathered(parameter, modifier_rank=1):
        parameter.data = value.to(parameter.dtype) if rank == 1 else torch.full_like(value, 99.0)
    assert torch.equal(engine.full_fp32(parameter), value)
    with pytest.raises(ShardedAccessError, match="edited inside"), engine.gathered(parameter):
        parameter.data = 2 * value.to(parameter.dtype)
    misfit = pytest.raises(StateError, match=r"blocks.0.up.weight' was given the shape \(3,\)")
    with misfit, engine.gathered(parameter, modifier_rank=rank):
        parameter.data = torch.ones(3)
    assert torch.equal(engine.full_fp32(parameter), value)
    for group in pair.optimizer.param_groups:
        group["lr"] = 0.0
    engine.backward(loss_of(engine, 0, rank))
    engine.step()
    assert torch.equal(engine.full_fp32(parameter), value)
    assert all(
        torch.equal(engine.full_fp32(p), others[n]) for n, p in pair.model.named_parameters() if n in others
    )
    engine.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@every_stage
def test_memory_given_to_a_gathered_weight_is_an_edit(ranks2: RankPool, stage: int, precision: str) -> None:
    ranks2.run(exchanged, stage, precision)
