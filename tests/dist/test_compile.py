"""torch.compile of blocks and of whole models: the numbers of eager PyTorch, few graphs, none after the first step.

The backends are those that need no C++ compiler; the slow test is with inductor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Recomputed, features
from pairs import Pair, config, momentum
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import NotYetError
from zeroshard.summary import summary
from zeroshard.testing import RankPool


class Counting:
    """A backend that counts the graphs it is given."""

    def __init__(self, name: str) -> None:
        self.name, self.graphs = name, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


def blocks_in_place(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def blocks_wrapped(model: Any, backend: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)
    return model


def parts_of_blocks(model: Any, backend: Any) -> Any:
    """A layer of each block, and a function that another one has."""
    for block in model.blocks:
        block.up.compile(backend=backend)
        block.norm.forward = torch.compile(block.norm.forward, backend=backend)
    return model


def whole_in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def whole_wrapped(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def train(
    rank: int,
    world: int,
    how: Callable[[Any, Any], Any],
    backend: str,
    stage: int,
    way: str | None = None,
    frozen: bool = False,
    **more: Any,
) -> tuple[float, list[int], int]:
    """Largest difference from plain PyTorch; graphs compiled so far, after each step; divergences."""
    torch._dynamo.reset()
    counting = Counting(backend)
    torch.manual_seed(0)
    reference = Recomputed(way)
    reference.drop.p = 0.0
    for block in reference.blocks[:2]:
        block.requires_grad_(not frozen)
    model = how(copy.deepcopy(reference), counting)
    reference.way = None
    engine, optimizer, _, _ = zeroshard.initialize(
        model=model, optimizer=momentum(model), config=config(stage, **more)
    )
    pair = Pair(rank, world, engine, optimizer, model, reference, momentum(reference))
    graphs = []
    for step in range(4):
        engine.backward(engine(features(step, 0, rank)))
        engine.step()
        pair.everybody(lambda net, at, step=step: net(features(step, 0, at)))
        pair.update()
        graphs.append(counting.graphs)
    divergences = engine.executor.divergences
    return pair.finish(), graphs, divergences


BLOCK, WHOLE = 1, 5
"""Graphs at most: all blocks share the code and shapes of the first; around are embedding, dropout, head, loss."""


@pytest.mark.parametrize(
    ("how", "stage", "graphs", "options"),
    [
        (blocks_in_place, 3, BLOCK, {}),
        (parts_of_blocks, 3, 2, {}),
        (whole_in_place, 3, WHOLE, {}),
        (whole_wrapped, 0, WHOLE, {}),
        (whole_wrapped, 1, WHOLE, {}),
        (blocks_wrapped, 2, BLOCK, {}),
        (blocks_wrapped, 3, 2 * BLOCK, {"frozen": True}),  # frozen blocks have a graph of their own
        (whole_wrapped, 3, WHOLE + BLOCK, {"frozen": True}),
        (blocks_in_place, 3, BLOCK, {"way": "torch"}),
        (blocks_wrapped, 3, 2 * BLOCK, {"way": "reentrant"}),  # without gradients, and with
        (blocks_wrapped, 3, BLOCK, {"way": "zeroshard"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_equal_to_eager_in_few_graphs(
    ranks2: RankPool, how: Callable[[Any, Any], Any], stage: int, graphs: int, options: dict[str, Any]
) -> None:
    for error, counted, divergences in ranks2.run(train, how, "eager", stage, **options):
        assert error <= 1e-6
        assert 0 < counted[0] <= graphs
        assert counted[0] == counted[-1]  # the first step compiles, and no other one
        assert divergences == 0


@pytest.mark.parametrize("how", [blocks_wrapped, whole_in_place], ids=lambda how: how.__name__)
def test_compiled_backward(ranks2: RankPool, how: Callable[[Any, Any], Any]) -> None:
    """Forward and backward are graphs of AOTAutograd: what they save of the weights is gathered for backward."""
    for error, counted, _ in ranks2.run(train, how, "aot_eager", 3):
        assert error <= 1e-6
        assert counted[0] == counted[-1] <= WHOLE


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", [blocks_in_place, whole_wrapped], ids=lambda how: how.__name__)
def test_inductor(ranks2: RankPool, how: Callable[[Any, Any], Any], frozen: bool) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        pytest.skip(f"no C++ compiler: {error}")
    for error, counted, _ in ranks2.run(train, how, "inductor", 3, frozen=frozen, timeout=600):
        assert error <= 1e-6
        assert counted[0] == counted[-1]


def later_and_elsewhere(rank: int, world: int) -> dict[str, tuple[float, int]]:
    """Compiled after `initialize` and around the engine or the model, with evaluation in between."""
    found = {}
    for name in ("torch.compile", "in a function"):
        torch._dynamo.reset()
        counting = Counting("eager")
        pair = Pair.of(rank, world, 3, lambda: Plain())
        engine: Any = pair.engine
        run: Callable[..., Tensor] = engine
        if name == "torch.compile":
            run = torch.compile(engine, backend=counting)
        else:
            run = torch.compile(lambda x, model=pair.model: model(x) * 1.0, backend=counting)
        for step in range(4):
            run(features(step, 0, rank)).backward()
            pair.optimizer.step()
            pair.everybody(lambda net, at, step=step: net(features(step, 0, at)))
            pair.update()
            with torch.no_grad():
                x = features(step, 1, 0)
                assert torch.allclose(run(x), pair.reference(x), atol=1e-6)
            if step == 1:
                after_two = counting.graphs
        assert counting.graphs == after_two
        found[name] = pair.finish(), counting.graphs
    return found


class Plain(Recomputed):
    def __init__(self) -> None:
        super().__init__(None)
        self.drop = nn.Identity()  # type: ignore[assignment]


@pytest.mark.slow
def test_compiled_after_initialize(ranks2: RankPool) -> None:
    for found in ranks2.run(later_and_elsewhere):
        assert max(error for error, _ in found.values()) <= 1e-6
        assert min(graphs for _, graphs in found.values()) > 0


def test_hooks_are_not_compiled_for_each_class_of_unit() -> None:
    """Dynamo's limit of recompilations holds for each function, and all units have the same hooks."""
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(3, 2, 1), nn.PReLU(2)
    )
    model.compile(backend="eager")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, *_ = zeroshard.initialize(
        model=model, config={"optimizer": {"type": "SGD"}, "zero_optimization": zero}
    )
    ids = torch.ones(2, 3, dtype=torch.int64)
    limited = torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
    with limited:  # type: ignore[no-untyped-call]
        engine(ids).sum().backward()
        with torch.no_grad():
            engine(ids)
    engine.close()


class Own(nn.Linear):
    """torch 2.9 and 2.11 compile the forward of a class in torch.nn only as a part of another one."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def test_engine_compile() -> None:
    model = Own(2, 2)
    engine, *_ = zeroshard.initialize(model=model, config={"optimizer": {"type": "SGD"}})
    with pytest.raises(NotYetError, match=r"schedule=.*DeepCompile"):
        engine.compile(schedule=[(0, [])])
    with pytest.raises(NotYetError, match="compiled_autograd_enabled=True"):
        engine.compile(compiled_autograd_enabled=True)
    assert not engine.is_compiled
    assert "compiled" not in summary(engine)
    counting = Counting("eager")
    engine.compile(backend=counting, compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    assert "compiled    the whole model; graphs are broken where weights come and go" in summary(engine)
    engine(torch.ones(1, 2)).sum().backward()
    assert counting.graphs == 1
    engine.close()


def test_summary_names_compiled_blocks() -> None:
    model = blocks_wrapped(Recomputed(None), "eager")
    engine, *_ = zeroshard.initialize(model=model, config={"optimizer": {"type": "SGD"}})
    assert "compiled    4 modules (blocks.0, ...); graphs" in summary(engine)
    engine.close()
