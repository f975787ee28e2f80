"""Control flow that ranks share may do what it likes; prefetch comes back from the second visit of a path."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, features
from torch import Tensor, nn

import zeroshard
from zeroshard.buffers import FlatBuffer
from zeroshard.errors import DivergedError, ScheduleError, ShardedAccessError, StateError
from zeroshard.gradients import GradientBuffer
from zeroshard.testing import RankPool, RunFailedError
from zeroshard.trace import Action, Kind

STAGE3 = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


class Routed(nn.Module):
    """Runs the blocks it is told, in that order."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(blocks))
        self.head = nn.Linear(6, 3)
        self.extra = nn.Linear(6, 3)

    def forward(self, x: Tensor, route: tuple[int, ...], fail: bool = False) -> Tensor:
        for index in route:
            x = self.blocks[index](x)
            if fail:
                raise ValueError("stopped on purpose")
        return self.head(x) if self.training else self.head(x) + self.extra(x)


def start(zero: dict[str, Any] | None = None, **more: Any) -> tuple[Any, Any, nn.Module, Any]:
    torch.manual_seed(0)
    reference = Routed()
    model = copy.deepcopy(reference)
    settings = {"gradient_clipping": 0, "zero_optimization": {**STAGE3, **(zero or {})}, **more}
    engine, _, _, _ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
    )
    return engine, model, reference, torch.optim.SGD(reference.parameters(), lr=0.1)


def train(
    engine: Any, reference: nn.Module, expected: Any, rank: int, world: int, step: int, route: Any
) -> None:
    engine.backward(engine(features(step, 0, rank), route).square().mean())
    engine.step()
    for other in range(world):
        (reference(features(step, 0, other), route).square().mean() / world).backward()
    expected.step()
    expected.zero_grad()


def finish(engine: Any, model: nn.Module, reference: nn.Module) -> float:
    executor = engine.executor
    executor.end_path()
    assert executor.peak_gathered <= executor.paths.predicted_peak(), (
        executor.peak_gathered,
        executor.paths.predicted_peak(),
    )
    engine.close()
    both = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p - q).abs().max()) for p, q in both)


def routes(rank: int, world: int, sequence: list[tuple[int, ...]]) -> tuple[float, int]:
    engine, model, reference, expected = start()
    for step, route in enumerate(sequence):
        train(engine, reference, expected, rank, world, step, route)
    divergences = engine.executor.divergences
    return finish(engine, model, reference), divergences


@pytest.mark.parametrize(
    ("sequence", "divergences"),
    [
        ([(0, 1, 2, 3)] * 4, 0),
        ([(0, 1, 2, 3), (0, 1, 3)] * 4, 1),  # a layer used every second step
        ([(0, 1, 2, 3), (3, 2, 1, 0), (2,), (0, 0, 0)] * 3, None),  # permuted, alone, repeated
        ([tuple(i for i in range(4) if (step >> i) & 1) for step in range(16)] * 3, None),  # layer drop
    ],
)
def test_routes(ranks2: RankPool, sequence: list[tuple[int, ...]], divergences: int | None) -> None:
    results = ranks2.run(routes, sequence)
    assert max(error for error, _ in results) <= 1e-6
    if divergences is not None:
        assert [count for _, count in results] == [divergences] * 2


def ahead(rank: int, world: int) -> list[int]:
    """Gathers launched before an earlier block's forward began, for each step of two alternating routes."""
    engine, model, reference, expected = start()
    counts = []
    for step in range(8):
        seen: list[Action] = []
        engine.executor.on_action = seen.append
        train(engine, reference, expected, rank, world, step, ((0, 1, 2, 3), (0, 1, 3))[step % 2])
        engine.executor.on_action = None
        open_gathers: set[int] = set()
        count = 0
        for kind, bucket in seen:
            if kind is Kind.GATHER:
                open_gathers.add(bucket)
            elif kind in (Kind.WAIT, Kind.FREE):
                open_gathers.discard(bucket)
            elif kind in (Kind.FORWARD, Kind.BACKWARD):
                count += bool(open_gathers)
        counts.append(count)
    finish(engine, model, reference)
    return counts


def test_prefetch_comes_back_from_the_second_visit(ranks2: RankPool) -> None:
    counts = ranks2.run(ahead)[0]
    assert counts[0] == 0  # nothing known yet
    assert all(count >= 5 for count in counts[2:])  # every compute but the first of a direction or a detour


def train_and_eval(rank: int, world: int) -> float:
    engine, model, reference, expected = start()
    for step in range(4):
        train(engine, reference, expected, rank, world, step, (0, 1, 2, 3))
        engine.eval()
        reference.eval()
        with torch.no_grad():
            for _ in range(2):
                x = features(step, 1, 0)
                assert torch.allclose(engine(x, (0, 2)), reference(x, (0, 2)), atol=1e-6)
        if step == 1:  # a step taken in eval mode, with the module that training does not use
            train(engine, reference, expected, rank, world, step, (1, 1))
        engine.train()
        reference.train()
    assert all(not b.is_live for b in engine._states.buffers if not b.layout.resident)
    return finish(engine, model, reference)


def failures(rank: int, world: int) -> float:
    """A forward or backward that raises on all ranks, and training goes on."""
    engine, model, reference, expected = start()
    train(engine, reference, expected, rank, world, 0, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="on purpose"):
        engine(features(1, 0, rank), (0, 1), fail=True)
    train(engine, reference, expected, rank, world, 1, (0, 1, 2, 3))
    out = engine(features(2, 0, rank), (0, 1, 2, 3))

    def refuse(gradient: Tensor) -> None:
        raise ValueError("stopped on purpose")

    out.register_hook(refuse)
    with pytest.raises(ValueError, match="on purpose"):
        out.square().mean().backward()
    engine.zero_grad()
    for step in (3, 4):
        train(engine, reference, expected, rank, world, step, (0, 1, 2, 3))
    return finish(engine, model, reference)


def two_forwards(rank: int, world: int) -> float:
    """Two forwards on one backward, the second along another route."""
    engine, model, reference, expected = start()
    for step in range(3):
        x = features(step, 0, rank)
        engine.backward(engine(x, (0, 1)).square().mean() + engine(x, (2, 1)).abs().mean())
        engine.step()
        for other in range(world):
            x = features(step, 0, other)
            loss = reference(x, (0, 1)).square().mean() + reference(x, (2, 1)).abs().mean()
            (loss / world).backward()
        expected.step()
        expected.zero_grad()
    return finish(engine, model, reference)


def parts_alone(rank: int, world: int) -> float:
    """Modules called one by one from outside, not through the root's forward."""
    engine, model, reference, expected = start()
    for step in range(3):
        x = features(step, 0, rank)
        for block in model.blocks:
            x = block(x)
        model.head(x).square().mean().backward()
        engine.optimizer.step()
        for other in range(world):
            x = features(step, 0, other)
            for block in reference.blocks:
                x = block(x)
            (reference.head(x).square().mean() / world).backward()
        expected.step()
        expected.zero_grad()
    return finish(engine, model, reference)


@pytest.mark.parametrize(
    "case", [train_and_eval, failures, two_forwards, parts_alone], ids=lambda case: case.__name__
)
def test_equal_to_plain_pytorch(ranks2: RankPool, case: Callable[..., float]) -> None:
    assert max(ranks2.run(case)) <= 1e-6


def different_modules(rank: int, world: int, shared: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROSHARD_SHARED_MEMORY", shared)
        engine, _, _, _ = start()
    for step in range(3):
        engine.backward(engine(features(step, 0, rank), (rank, 2)).square().mean())
        engine.step()


@pytest.mark.parametrize(("shared", "error"), [("0", ScheduleError), ("1", DivergedError)])
def test_ranks_that_run_different_modules_are_told(
    ranks2: RankPool, shared: str, error: type[Exception]
) -> None:
    """At the step; before the data are used where the seam can compare. `test_divergence.py` has more."""
    with pytest.raises(RunFailedError, match=r"ran different modules|did not run the same modules") as caught:
        ranks2.run(different_modules, shared)
    assert all(isinstance(outcome.exception, error) for outcome in caught.value.outcomes)


def outside(rank: int, world: int) -> dict[str, str]:
    engine, model, reference, _ = start()
    weight = model.blocks[0].up.weight
    other = reference.blocks[0].up.weight
    facts = ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "grad", "nbytes", "is_cuda")
    assert all(getattr(weight, name) == getattr(other, name) for name in facts)
    assert (weight.numel(), weight.size(0), weight.size(), weight.dim()) == (
        other.numel(),
        other.size(0),
        other.size(),
        other.dim(),
    )
    assert weight.stride() == other.stride()
    assert len(weight) == len(other)
    assert weight.is_contiguous()
    assert weight.element_size() == 4
    assert isinstance(weight, nn.Parameter)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())
    assert engine.status(weight) is zeroshard.ZeroParamStatus.NOT_AVAILABLE
    text = repr(weight)
    messages = {"repr": text}
    for name, touch in {
        "sum": lambda: weight.sum(),
        "data": lambda: weight.data,
        "detach": lambda: weight.detach(),
        "add": lambda: 1 + weight,
        "linear": lambda: torch.nn.functional.linear(torch.ones(1, 6), weight),
        "copy_": lambda: nn.init.zeros_(weight),
        "deepcopy": lambda: copy.deepcopy(weight),
        "tolist": lambda: weight.tolist(),
        "stack": lambda: torch.stack([weight, weight]),
    }.items():
        with pytest.raises(ShardedAccessError) as error:
            touch()
        messages[name] = str(error.value)
    with engine.gathered([weight]):
        assert engine.status(weight) is zeroshard.ZeroParamStatus.AVAILABLE
        assert torch.equal(weight, other)
        assert type(weight) is nn.Parameter
    assert engine.status(weight) is zeroshard.ZeroParamStatus.NOT_AVAILABLE
    engine.close()
    assert torch.equal(weight, other)
    return messages


def test_reading_a_sharded_parameter_outside_forward(ranks2: RankPool) -> None:
    for messages in ranks2.run(outside):
        assert "ShardedParameter('blocks.0.up.weight', shape=(5, 6)" in messages.pop("repr")
        for name, message in messages.items():
            assert "'blocks.0.up.weight' (shape (5, 6)) is sharded over 2 ranks" in message, name
            assert "engine.gathered([param])" in message


def edits(rank: int, world: int, stage: int, bf16: bool) -> None:
    engine, model, _, _ = start({"stage": stage}, bf16={"enabled": bf16})
    weight = model.blocks[1].up.weight
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    with pytest.raises(ShardedAccessError, match="modifier_rank"), engine.gathered(weight), torch.no_grad():
        weight.fill_(rank + 1.0)
    with pytest.raises(ShardedAccessError, match="modifier_rank"), engine.gathered(weight):
        weight.data.fill_(rank + 2.0)  # leaves no version behind
    with pytest.raises(ShardedAccessError, match="modifier_rank"), engine.gathered(weight):
        weight.data.copy_(torch.arange(float(weight.numel())).view_as(weight))
    with engine.gathered(weight, modifier_rank=0):
        weight.data.copy_(torch.arange(float(weight.numel())).view_as(weight))
    with pytest.raises(ShardedAccessError, match="modifier_rank"), engine.gathered(weight):
        weight.data.copy_(weight.data.flip(0))  # the same values in other places
    with pytest.raises(StateError, match=r"inside engine\.gathered"), engine.gathered(weight):
        engine.close()
    with engine.gathered(weight, modifier_rank=1), torch.no_grad():
        weight.fill_(rank + 5.0)
    for step in range(2):
        engine.backward(engine(features(step, 0, rank), (0, 1)).square().mean())
        engine.step()
    with engine.gathered(model.blocks):
        assert bool((weight == 6.0).all())
    assert bool((engine.full_fp32(weight) == 6.0).all())
    with (
        pytest.raises(ShardedAccessError, match="not one of this engine's parameters"),
        engine.gathered(torch.zeros(3)),
    ):
        pass
    with pytest.raises(ZeroDivisionError), engine.gathered(model):
        raise ZeroDivisionError
    assert all(not b.is_live for b in engine._states.buffers if not b.layout.resident)
    engine.close()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_edits_inside_gathered(ranks2: RankPool, stage: int, bf16: bool) -> None:
    ranks2.run(edits, stage, bf16)


def read_right_after_step(rank: int, world: int, stage: int) -> float:
    """An average of the weights, updated right after the step while their gather may be in flight."""
    engine, model, reference, expected = start({"stage": stage})
    ours = [p.detach().clone() for p in reference.parameters()]
    theirs = [p.detach().clone() for p in reference.parameters()]
    for step in range(3):
        train(engine, reference, expected, rank, world, step, (0, 1, 2, 3))
        with torch.no_grad():
            for average, parameter in zip(ours, model.parameters(), strict=True):
                average.lerp_(parameter, 0.5)
            for average, parameter in zip(theirs, reference.parameters(), strict=True):
                average.lerp_(parameter, 0.5)
    engine.close()
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_resident_weights_can_be_read_right_after_the_step(ranks2: RankPool, stage: int) -> None:
    assert max(ranks2.run(read_right_after_step, stage)) <= 1e-6


def edits_outside(rank: int, world: int, stage: int, bf16: bool) -> None:
    """Resident weights may be edited in place between steps, on all ranks alike; the masters follow."""
    engine, model, _, _ = start({"stage": stage}, bf16={"enabled": bf16})
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    for step in range(3):
        engine.backward(engine(features(step, 0, rank), (0, 1)).square().mean())
        engine.step()
        with torch.no_grad():
            model.blocks[0].up.weight.fill_(step)
    engine.backward(engine(features(3, 0, rank), (0, 1)).square().mean())
    engine.step()
    assert bool((model.blocks[0].up.weight == 2).all())
    assert bool((engine.full_fp32(model.blocks[0].up.weight) == 2).all())
    engine.close()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_of_resident_weights_between_steps(ranks2: RankPool, stage: int, bf16: bool) -> None:
    ranks2.run(edits_outside, stage, bf16)


def looking_on(rank: int, world: int) -> tuple[float, int]:
    """The schedule is read at all moments of a step; nothing comes of it."""
    engine, model, reference, expected = start()
    for step in range(4):
        loss = engine(features(step, 0, rank), (0, 1, 2)).square().mean()
        str(engine.schedule)
        loss.register_hook(lambda _: print(str(engine.schedule)[:0], end=""))
        engine.backward(loss)
        str(engine.schedule)
        engine.step()
        for other in range(world):
            (reference(features(step, 0, other), (0, 1, 2)).square().mean() / world).backward()
        expected.step()
        expected.zero_grad()
    divergences = engine.executor.divergences
    return finish(engine, model, reference), divergences


def test_reading_the_schedule_changes_nothing(ranks2: RankPool) -> None:
    for error, divergences in ranks2.run(looking_on):
        assert error <= 1e-6
        assert divergences == 0


class Prompted(nn.Module):
    """Frozen blocks under a trainable input that is a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5).requires_grad_(False) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.again = nn.Identity()
        self.again.register_buffer("wide", self.wide)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def leaf_inputs(rank: int, world: int) -> list[int]:
    model = Prompted()
    engine, _, _, _ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.head.parameters(), lr=0.1),
        config={"zero_optimization": STAGE3},
    )
    assert model.wide is model.again.wide
    prompt = features(0, 0, 0).requires_grad_()
    counts = []
    for _ in range(3):
        engine.backward(engine(prompt))
        engine.step()
        counts.append(len(prompt._backward_hooks or ()))
    engine.close()
    return counts


def test_hooks_on_a_leaf_input_do_not_pile_up(ranks2: RankPool) -> None:
    assert ranks2.run(leaf_inputs) == [[0, 0, 0]] * 2


def life_cycle(rank: int, world: int, stage: int) -> tuple[float, int, int]:
    """Five engines one after the other on one model."""
    torch.manual_seed(0)
    reference = Routed()
    model = copy.deepcopy(reference)
    for turn in range(5):
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference)]
        engine, _, _, _ = zeroshard.initialize(
            model=model,
            optimizer=optimizers[0],
            config={"gradient_clipping": 0, "zero_optimization": {**STAGE3, "stage": stage}},
        )
        train(engine, reference, optimizers[1], rank, world, turn, (0, 1, 2, 3))
        engine.close()
        engine.close()
        alive = [b for b in gc.get_objects() if isinstance(b, FlatBuffer | GradientBuffer)]
        assert not alive
        assert not optimizers[0].state
        with pytest.raises(StateError, match=r"after engine\.close"):
            optimizers[0].step()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    hooks += sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    model(features(0, 0, 0), (0, 1)).square().mean().backward()
    assert model.head.weight.grad is not None
    copy.deepcopy(model)
    both = zip(model.parameters(), reference.parameters(), strict=True)
    private = sum("_zeroshard" in vars(p) for p in model.parameters())
    return max(float((p - q).abs().max()) for p, q in both), hooks, private


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_close_leaves_a_plain_model(ranks2: RankPool, stage: int) -> None:
    for error, hooks, private in ranks2.run(life_cycle, stage):
        assert error <= 1e-6
        assert hooks == 0
        assert private == 0


class Borrowing(Routed):
    """Uses the first block's weight once more, right after the block and again at the end."""

    def forward(self, x: Tensor, route: tuple[int, ...], fail: bool = False) -> Tensor:
        x = self.blocks[0](x)
        x = x + torch.tanh(torch.nn.functional.linear(torch.tanh(x), self.blocks[0].up.weight)) @ self.mix
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x) + torch.nn.functional.linear(x, self.blocks[0].up.weight).mean()

    mix = torch.linspace(-1, 1, 30).view(5, 6)


def borrowing(rank: int, world: int, reuse: int) -> tuple[float, int, int]:
    torch.manual_seed(0)
    reference = Borrowing()
    model = copy.deepcopy(reference)
    engine, _, _, _ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"gradient_clipping": 0, "zero_optimization": {**STAGE3, "stage3_max_reuse_distance": reuse}},
    )
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        gathers = 0

        def count(action: Action) -> None:
            nonlocal gathers
            gathers += action.kind is Kind.GATHER

        engine.executor.on_action = count
        train(engine, reference, expected, rank, world, step, ())
    return finish(engine, model, reference), engine.executor.divergences, gathers


@pytest.mark.parametrize("reuse", [0, 10**9])
def test_a_kept_weight_that_its_parent_uses(ranks2: RankPool, reuse: int) -> None:
    """Kept from one use to the next, it is not used behind the schedule's back."""
    for error, divergences, gathers in ranks2.run(borrowing, reuse):
        assert error <= 1e-6
        assert divergences == 0
        assert gathers <= (12 if not reuse else 5)
