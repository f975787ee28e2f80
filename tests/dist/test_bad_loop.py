"""Mistakes in the training loop: each is one clear error on every rank, and nothing hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import features
from pairs import Net, Pair, attempt, config, momentum
from torch import nn

import zeroshard
from zeroshard.testing import RankPool

Case = tuple[str, str]


def squares(pair: Pair, micro: int = 0) -> torch.Tensor:
    return pair.engine(features(0, micro, pair.rank)).square()


def scheduler_without_optimizer(rank: int, world: int, stage: int) -> Case:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    return attempt(lambda: zeroshard.initialize(model=Net(), lr_scheduler=schedule, config=config(stage)))


def parameter_in_two_groups(rank: int, world: int, stage: int) -> Case:
    model = Net()
    optimizer = momentum(model)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.heads[0].weight]})
    return attempt(lambda: zeroshard.initialize(model=model, optimizer=optimizer, config=config(stage)))


def closure(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    pair.engine.backward(squares(pair).mean())
    return closing(pair, lambda: pair.optimizer.step(lambda: squares(pair).mean()))


def closing(pair: Pair, act: Any) -> Case:
    """What `act` raised; after it the engine still trains, and closes."""
    found = attempt(act)
    pair.engine.zero_grad()
    pair.engine.set_gradient_accumulation_boundary(None)
    for micro in range(pair.engine.gradient_accumulation_steps()):
        pair.engine.backward(squares(pair, micro).mean())
        pair.engine.step()
    pair.engine.close()
    return found


def loss_without_gradient(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    with torch.no_grad():
        loss = squares(pair).mean()
    return closing(pair, lambda: pair.engine.backward(loss))


def loss_with_elements(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    return closing(pair, lambda: pair.engine.backward(squares(pair)))


def loss_that_is_a_number(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    return closing(pair, lambda: pair.engine.backward(squares(pair).mean().item()))


def step_before_backward(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    return closing(pair, pair.engine.step)


def step_after_a_forward_only(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    squares(pair).mean()
    return closing(pair, pair.engine.step)


def backward_after_close(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    loss = squares(pair).mean()
    pair.engine.close()
    return attempt(lambda: pair.engine.backward(loss))


def step_after_close(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    pair.engine.backward(squares(pair).mean())
    pair.engine.close()
    return attempt(pair.engine.step)


def gathered_after_close(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    pair.engine.close()

    def act() -> None:
        with pair.engine.gathered():
            pass

    return attempt(act)


def batch_that_does_not_divide(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage, train_micro_batch_size_per_gpu=3)
    return closing(pair, lambda: pair.engine.set_train_batch_size(8))


def batch_of_nothing(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage, train_micro_batch_size_per_gpu=3)
    return closing(pair, lambda: pair.engine.set_train_batch_size(0))


def batch_without_micro_batch(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    return closing(pair, lambda: pair.engine.set_train_batch_size(8))


def batch_changed_within_a_window(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)
    pair.engine.backward(squares(pair).mean())
    pair.engine.step()
    found = attempt(lambda: pair.engine.set_train_batch_size(3 * world))
    pair.engine.backward(squares(pair, 1).mean())
    assert pair.engine.step() is not None
    pair.engine.close()
    return found


def tokens_below_zero(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    return closing(pair, lambda: pair.engine.backward(squares(pair).mean(), tokens=-1))


def step_inside_gathered(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    pair.engine.backward(squares(pair).mean())

    def act() -> None:
        with pair.engine.gathered():
            pair.engine.step()

    return closing(pair, act)


def gradient_given_by_hand(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    piece = pair.optimizer.param_groups[0]["params"][0]

    def act() -> None:
        piece.grad = torch.ones_like(piece)

    return closing(pair, act)


def moved(rank: int, world: int, stage: int) -> Case:
    pair = Pair.of(rank, world, stage)
    assert pair.engine.to("cpu") is pair.engine.to(torch.device("cpu:0"), torch.float32) is pair.engine
    pair.engine.module.to(torch.device("cpu"), torch.float32)  # nothing to do, sharded or not
    return closing(pair, lambda: pair.engine.to(torch.bfloat16))


CASES = [
    (
        moved,
        "StateError",
        ("engine.to(torch.bfloat16)", "torch.float32 on cpu", "Choose the dtype in the config"),
    ),
    (scheduler_without_optimizer, "ConfigError", ("StepLR", "needs an optimizer", "pass optimizer=")),
    (parameter_in_two_groups, "ModelError", ("'heads.0.weight'", "groups 0 and 1", "once")),
    (closure, "StateError", ("closure", "call step() without it")),
    (loss_without_gradient, "StateError", ("requires_grad=False", "torch.no_grad()")),
    (loss_with_elements, "StateError", ("shape (4, 3)", "average or sum")),
    (loss_that_is_a_number, "StateError", ("got float", "a tensor of one element")),
    (step_before_backward, "StateError", ("before any backward", "engine.backward(loss)")),
    (step_after_a_forward_only, "StateError", ("before any backward", "engine.backward(loss)")),
    (backward_after_close, "StateError", ("backward after engine.close()", "initialize")),
    (step_after_close, "StateError", ("step after engine.close()", "initialize")),
    (gathered_after_close, "StateError", ("gathered after engine.close()", "initialize")),
    (batch_that_does_not_divide, "ConfigError", ("set_train_batch_size(8)", "multiple of 6", "2 ranks")),
    (batch_of_nothing, "ConfigError", ("set_train_batch_size(0)", "multiple of 6")),
    (batch_without_micro_batch, "ConfigError", ("train_micro_batch_size_per_gpu",)),
    (batch_changed_within_a_window, "StateError", ("between two windows", "right after a step")),
    (tokens_below_zero, "StateError", ("tokens=-1", "0 or more")),
    (step_inside_gathered, "StateError", ("inside engine.gathered()", "Leave the block")),
    (gradient_given_by_hand, "ValueError", ("none in this window", "not supported")),
]


@pytest.mark.parametrize(("case", "kind", "words"), CASES, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("stage", [0, 3])
def test_mistakes_in_the_loop(
    ranks2: RankPool, stage: int, case: Any, kind: str, words: tuple[str, ...]
) -> None:
    for found, message in ranks2.run(case, stage):
        assert found == kind, message
        for word in words:
            assert word in message
        assert len(message) < 600


def mixed_weights(rank: int, world: int, stage: int, where: str) -> tuple[str, str]:
    pair = Pair.of(rank, world, stage, gradient_accumulation_steps=2)

    def act() -> None:
        for micro in range(2):
            weighted = rank == 0 if where == "rank" else micro == 0
            loss = squares(pair, micro).mean()
            pair.engine.backward(loss, **({"tokens": 5} if weighted else {}))
            pair.engine.step()

    found = attempt(act)
    pair.engine.close()
    return found


@pytest.mark.parametrize("where", ["rank", "micro"])
@pytest.mark.parametrize("stage", [1, 3])
def test_weighted_and_unweighted_do_not_mix(ranks2: RankPool, stage: int, where: str) -> None:
    for kind, message in ranks2.run(mixed_weights, stage, where):
        assert kind == "StateError"
        assert "2 of the 4 backwards of this window, over all ranks, had `tokens`" in message


class Failing(torch.optim.SGD):
    """Raises when it has changed the masters."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.fails:
            raise KeyError("as a test")
        return result


def outlived(rank: int, world: int, stage: int) -> float:
    """What an optimizer did before it raised counts, alike on all ranks, as in plain PyTorch."""
    pair = Pair.of(rank, world, stage, Net, lambda model: Failing(model.parameters(), lr=0.1))
    worst = 0.0
    for number in range(4):
        pair.optimizer.fails = number == 1
        loss = pair.engine(features(number, 0, rank)).square().mean()
        pair.everybody(lambda net, at, number=number: net(features(number, 0, at)).square().mean())
        pair.engine.backward(loss)
        assert attempt(pair.engine.step)[0] == ("KeyError" if number == 1 else "nothing")
        pair.update()
        pair.engine.zero_grad()
        with torch.no_grad():
            difference = pair.engine(features(9, 0, 0)) - pair.reference(features(9, 0, 0))
        worst = max(worst, float(difference.abs().max()), pair.distance())
    return worst


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_that_raises(ranks2: RankPool, stage: int) -> None:
    assert max(ranks2.run(outlived, stage)) <= 1e-6
