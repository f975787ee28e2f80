"""Uses that broke it once: dtypes, edits, gradients set by hand, weights used off the beaten track."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import features, sgd
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import ModelError, ShardedAccessError, StateError
from zeroshard.testing import RankPool, assert_parity

STAGES = (0, 1, 2, 3)


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {"gradient_clipping": 0, **more, "zero_optimization": zero}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks of class `block` and a head of one output."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def start(
    stage: int, model_fn: Callable[[], nn.Module] = Net, optimizer_fn: Callable[..., Any] = sgd, **more: Any
) -> tuple[Any, Any, nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    reference = model_fn()
    model = copy.deepcopy(reference)
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model, optimizer=optimizer_fn(model), config=config(stage, **more)
    )
    return engine, optimizer, model, reference, optimizer_fn(reference)


def train(engine: Any, reference: nn.Module, expected: Any, rank: int, world: int, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(features(step, 0, rank)))
        engine.step()
        for other in range(world):
            (reference(features(step, 0, other)) / world).backward()
        expected.step()
        expected.zero_grad()


def finish(engine: Any, model: nn.Module, reference: nn.Module) -> float:
    engine.close()
    both = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in both)


class Mixed(Net):
    """One block and its inputs in float64, the rest in float32, and frozen integers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].double()
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x).double()).float()
        return self.head(self.blocks[2](x)).square().mean() * self.codes.float().mean()


@pytest.mark.parametrize("stage", STAGES)
def test_float64_next_to_float32(ranks2: RankPool, stage: int) -> None:
    assert_parity(Mixed, features, config(stage, gradient_clipping=0.5), optimizer_fn=sgd, pool=ranks2)


def edit_one(rank: int, world: int, stage: int) -> float:
    """How far the masters of all other parameters move when one is edited under bf16."""
    engine, _, model, _, _ = start(stage, bf16={"enabled": True})
    before = {name: engine.full_fp32(parameter) for name, parameter in model.named_parameters()}
    with engine.gathered(model, modifier_rank=0), torch.no_grad():
        model.head.bias.fill_(7.0)
    after = {name: engine.full_fp32(parameter) for name, parameter in model.named_parameters()}
    engine.close()
    assert bool((after.pop("head.bias") == 7.0).all())
    return max(float((after[name] - before[name]).abs().max()) for name in after)


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_leaves_the_masters_of_other_parameters_alone(ranks2: RankPool, stage: int) -> None:
    assert ranks2.run(edit_one, stage) == [0.0, 0.0]


def copy_after_step(rank: int, world: int, stage: int) -> bool:
    """An averaged copy of the model is made while the gather that follows the step may be in flight."""
    engine, _, model, reference, expected = start(stage)
    train(engine, reference, expected, rank, world, 1)
    twin = copy.deepcopy(model)
    engine.backward(engine(features(1, 0, rank)))
    engine.optimizer.param_groups[0]["lr"] = 0.0
    engine.optimizer.param_groups[0]["momentum"] = 0.0
    engine.step()
    assert torch.equal(pickle.loads(pickle.dumps(model.head.weight)), model.head.weight)
    both = list(zip(twin.parameters(), model.parameters(), strict=True))
    same = all(torch.equal(p, q) and p.data_ptr() != q.data_ptr() for p, q in both)
    same = same and all(type(p) is nn.Parameter for p, _ in both)
    engine.close()
    return same


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepcopy_right_after_the_step(ranks2: RankPool, stage: int) -> None:
    assert ranks2.run(copy_after_step, stage) == [True, True]


def ignored(rank: int, world: int, stage: int) -> list[str]:
    """Two ways to a gradient that the update would leave out; each is an error on every rank."""
    messages = []

    def attempt(act: Callable[[Any, Any, nn.Module], None]) -> None:
        engine, optimizer, model, _, _ = start(stage, Net)
        with pytest.raises(StateError) as error:
            act(engine, optimizer, model)
        messages.append(str(error.value))
        engine.close()

    def by_hand(engine: Any, optimizer: Any, model: nn.Module) -> None:
        engine.backward(engine(features(0, 0, rank)))
        with engine.gathered(model.head):
            model.head.weight.grad = torch.ones(1, 6)
        optimizer.step()

    def new_group(engine: Any, optimizer: Any, model: nn.Module) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        engine.backward(engine(features(0, 0, rank)))
        engine.step()

    attempt(by_hand)
    attempt(new_group)
    return messages


@pytest.mark.parametrize("stage", STAGES)
def test_no_gradient_is_silently_ignored(ranks2: RankPool, stage: int) -> None:
    for by_hand, new_group in ranks2.run(ignored, stage):
        assert "'head.weight' has a .grad that the engine did not collect" in by_hand
        assert "group 1 got a parameter (shape (2,)) that this engine does not hold" in new_group


def other_memory(rank: int, world: int, stage: int) -> str:
    engine, _, model, _, _ = start(stage)
    engine.backward(engine(features(0, 0, rank)))
    model.head.weight.data = torch.zeros(1, 6)
    with pytest.raises(StateError) as error:
        engine.step()
    engine.close()
    return str(error.value)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_cut_off_from_the_engine_are_noticed(ranks2: RankPool, stage: int) -> None:
    for message in ranks2.run(other_memory, stage):
        assert "'head.weight' was given other memory" in message


class Renormed(nn.Module):
    """An embedding that edits its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, max_norm=1.0)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x.abs().long())).square().mean()


def edit_in_forward(rank: int, world: int) -> str:
    engine, _, _, _, _ = start(3, Renormed)
    with pytest.raises(ShardedAccessError) as error:
        engine.backward(engine(features(0, 0, rank)))
    engine.close()
    return str(error.value)


def test_an_edit_in_forward_is_not_lost_in_silence(ranks2: RankPool) -> None:
    for message in ranks2.run(edit_in_forward):
        assert "'embed.weight' was edited in place" in message


def parity(rank: int, world: int, stage: int, model_fn: Callable[[], nn.Module]) -> float:
    engine, _, model, reference, expected = start(stage, model_fn)
    train(engine, reference, expected, rank, world, 4)
    return finish(engine, model, reference)


class UsedTwice(nn.Module):
    """The root uses weights of modules that it does not call, several times each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tied = nn.Linear(6, 6, bias=False)
        self.scales = nn.ParameterDict({"x": torch.randn(6), "y": torch.randn(())})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        weight = self.tied.weight / self.tied.weight.norm(dim=-1, keepdim=True)
        return (x @ weight.t() * self.scales["x"] * self.scales["y"]).square().mean()


class NoOutput(nn.Module):
    """A block that returns nothing and leaves its result in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, found: list[Tensor]) -> None:
        found.append(self.block(found[-1]))


class InsideHandler(Net):
    """A forward that runs while an exception is being handled."""

    block = NoOutput

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        try:
            raise ValueError
        except ValueError:
            for block in self.blocks:
                block(found)
        return self.head(found[-1]).square().mean()


class Penalised(Net):
    """The gradient of the loss by its input is part of the loss: a backward through a backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = super().forward(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().mean()


@pytest.mark.parametrize("model_fn", [UsedTwice, InsideHandler, Penalised])
@pytest.mark.parametrize("stage", STAGES)
def test_unusual_uses_of_weights(ranks2: RankPool, stage: int, model_fn: Callable[[], nn.Module]) -> None:
    assert max(ranks2.run(parity, stage, model_fn)) <= 1e-6


def backward_after_close(rank: int, world: int) -> bool:
    engine, _, model, reference, _ = start(3)
    loss = engine(features(0, 0, rank))
    engine.close()
    loss.backward()
    same = finish(engine, model, reference) == 0.0
    reference(features(0, 0, rank)).backward()
    both = zip(model.parameters(), reference.parameters(), strict=True)
    return same and all(torch.allclose(p.grad, q.grad) for p, q in both)  # type: ignore[arg-type]


def test_a_graph_outlives_its_engine(ranks2: RankPool) -> None:
    assert ranks2.run(backward_after_close) == [True, True]


def stale_graph(rank: int, world: int, stage: int) -> None:
    engine, _, _, _, _ = start(stage)
    first, second = engine(features(0, 0, rank)), engine(features(1, 0, rank))
    engine.backward(first)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(second)
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_backward_of_a_graph_from_before_the_step(ranks2: RankPool, stage: int) -> None:
    """Its weights are gone: an error, as in plain PyTorch, and not a gradient of something else."""
    ranks2.run(stale_graph, stage)


def ranks_disagree(rank: int, world: int) -> list[str]:
    messages = []
    for width, stage in ((rank, 3), (0, 2 + rank)):
        model = nn.Linear(6, 5 + width)
        with pytest.raises(ModelError) as error:
            zeroshard.initialize(model=model, optimizer=sgd(model), config=config(stage))
        messages.append(str(error.value))
    odd = nn.Linear(6, 5)
    odd.codes = nn.Parameter(torch.ones(3).to(torch.float8_e5m2fnuz), requires_grad=False)
    with pytest.raises(ModelError) as error:
        zeroshard.initialize(model=odd, optimizer=sgd(odd), config=config(3))
    return [*messages, str(error.value)]


def test_models_that_cannot_be_shared(ranks2: RankPool) -> None:
    for model, settings, dtype in ranks2.run(ranks_disagree):
        assert "different model's parameters" in model
        assert "different zero_optimization" in settings
        assert "'codes' has dtype float8_e5m2fnuz" in dtype


def as_a_module(rank: int, world: int, stage: int) -> bool:
    """What nn.Module offers works on the engine as well."""
    engine, _, _, reference, _ = start(stage)
    engine.module.register_buffer("table", torch.ones(2))
    assert len(list(engine.buffers())) == 1
    assert engine.to("cpu") is engine
    with engine.gathered():
        state = {name.removeprefix("module."): value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return all(torch.equal(value, state[name]) for name, value in reference.state_dict().items())


@pytest.mark.parametrize("stage", [0, 2])
def test_the_engine_is_a_module(ranks2: RankPool, stage: int) -> None:
    assert ranks2.run(as_a_module, stage) == [True, True]


class LeavesTrace(Block):
    """Its result is used through an attribute; what it returns requires grad, but the loss ignores it."""

    def forward(self, x: Tensor) -> Tensor:
        self.trace = x * self.up.weight[0] * self.up.weight[1] + self.down(torch.tanh(self.up(x)))
        return x + self.trace


class UsesTraces(Net):
    block = LeavesTrace

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return sum(block.trace.square().mean() for block in self.blocks)  # type: ignore[return-value]


class Detaches(Block):
    """Uses its weights also cut off from their gradient: they are read after their gradient came."""

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.up.weight.detach().t()) @ self.down.weight.detach().t()
        return h + super().forward(x + h)


class DetachedWeights(Net):
    block = Detaches


@pytest.mark.parametrize("model_fn", [UsesTraces, DetachedWeights])
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_read_where_no_output_tells(
    ranks2: RankPool, stage: int, model_fn: Callable[[], nn.Module]
) -> None:
    assert max(ranks2.run(parity, stage, model_fn)) <= 1e-6
