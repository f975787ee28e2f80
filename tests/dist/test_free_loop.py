"""What loops do beyond forward, backward, step: several engines, hooks, weights of micro-batches, windows of
every length. Each equals plain PyTorch at every stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, features
from pairs import STAGES, Net, Pair, adamw, attempt, config, momentum
from torch import Tensor, nn

import zeroshard
from zeroshard.testing import RankPool


def mean_square(net: Any, step: int, rank: int, head: int = 0, micro: int = 0) -> Tensor:
    return net(features(step, micro, rank), head).square().mean()


# ---- several engines --------------------------------------------------------------------------------


def joint_loss(rank: int, world: int, stage: int) -> float:
    """B 26: one loss of two models, one after the other and side by side, one backward, both step."""
    first = Pair.of(rank, world, stage)
    second = Pair.of(rank, world, stage, optimizer_fn=adamw, seed=1)

    def loss_of(a: Any, b: Any, step: int, at: int) -> Tensor:
        x = features(step, 0, at)
        inner = torch.cat([a(x), a(x * 2)], -1)
        return (b(inner) - a(x)).square().mean() + b(x, 1).abs().mean()

    for step in range(4):
        loss = loss_of(first.engine, second.engine, step, rank)
        # Either engine's backward is as good as the tensor's own.
        (first.engine.backward if step % 2 else torch.Tensor.backward)(loss)
        first.engine.step()
        second.engine.step()
        for at in range(world):
            (loss_of(first.reference, second.reference, step, at) / world).backward()
        first.update()
        second.update()
    return max(first.finish(), second.finish())


class Judge(Net):
    def forward(self, x: Tensor, head: int = 1) -> Tensor:
        return super().forward(x, head)


class Maker(Net):
    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return x + self.blocks[1](self.blocks[0](x))


def adversaries(rank: int, world: int, stage: int, managed: bool) -> float:
    """B 25: a GAN's loop, each with an optimizer, a rate and a schedule of its own. The judge's step runs
    backward through the maker too; `zero_grad` before the maker's own backward is all that keeps it out."""
    maker = Pair.of(rank, world, stage, Maker, adamw)
    judge = Pair.of(rank, world, stage, Judge, momentum, seed=1)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for optimizer in (maker.optimizer, judge.optimizer, maker.expected, judge.expected)
    ]

    def judging(g: Any, d: Any, step: int, at: int) -> Tensor:
        noise, real = features(step, 0, at), features(step, 1, at)
        return (d(real) - 1).square().mean() + d(g(noise)).square().mean()

    def making(g: Any, d: Any, step: int, at: int) -> Tensor:
        return (d(g(features(step, 2, at))) - 1).square().mean()

    for step in range(4):
        for loss_of, pair in ((judging, judge), (making, maker)):
            pair.engine.zero_grad() if step % 2 else pair.optimizer.zero_grad()
            loss = loss_of(maker.engine, judge.engine, step, rank)
            if managed:
                pair.engine.backward(loss)
                pair.engine.step()
            else:
                loss.backward()
                pair.optimizer.step()
            pair.expected.zero_grad()
            for at in range(world):
                (loss_of(maker.reference, judge.reference, step, at) / world).backward()
            pair.expected.step()
            if managed:  # `engine.step` drops the gradients it used
                pair.expected.zero_grad()
            else:
                pair.optimizer.zero_grad()
                pair.expected.zero_grad()
        for schedule in schedules:
            schedule.step()
    return max(maker.finish(), judge.finish())


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_adversaries(ranks2: RankPool, stage: int, managed: bool) -> None:
    assert max(ranks2.run(adversaries, stage, managed)) <= 1e-6


def teacher_engine(rank: int, world: int, stage: int) -> float:
    """B 26: a frozen teacher under an engine that has no optimizer, with a gradient through it to the student."""
    student = Pair.of(rank, world, stage, Maker)
    torch.manual_seed(1)
    teacher = Judge().requires_grad_(False)
    kept = [p.detach().clone() for p in teacher.parameters()]
    teaching, _, _, _ = zeroshard.initialize(model=teacher, config=config(stage))
    torch.manual_seed(1)
    plain = Judge().requires_grad_(False)
    for step in range(3):
        loss = teaching(student.engine(features(step, 0, rank))).square().mean()
        student.engine.backward(loss)
        student.engine.step()
        student.everybody(lambda net, at, step=step: plain(net(features(step, 0, at))).square().mean())
        student.update()
    teaching.close()
    assert all(torch.equal(p, q) for p, q in zip(teacher.parameters(), kept, strict=True))
    return student.finish()


# ---- gradients of gradients, hooks ------------------------------------------------------------------


def penalty(net: Any, step: int, at: int) -> Tensor:
    x = features(step, 0, at).requires_grad_()
    out = net(x, 1)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=-1) - 1).square().mean()


def gradient_penalty(rank: int, world: int, stage: int) -> float:
    """The slope by the input is part of the loss, taken outside of the model's forward."""
    pair = Pair.of(rank, world, stage)
    for step in range(3):
        pair.engine.backward(penalty(pair.engine, step, rank))
        pair.engine.step()
        pair.everybody(lambda net, at, step=step: penalty(net, step, at))
        pair.update()
    return pair.finish()


def scaling_hooks(rank: int, world: int, stage: int) -> float:
    """`param.register_hook` sees this rank's gradient before it is reduced; what it returns counts."""
    pair = Pair.of(rank, world, stage)
    seen: list[Tensor] = []

    def scale(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * 3

    weight, other = pair.model.blocks[0].up.weight, pair.reference.blocks[0].up.weight
    handle = weight.register_hook(scale)
    pair.model.heads[0].bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    error = 0.0
    for step in range(3):
        seen.clear()
        pair.engine.backward(mean_square(pair.engine, step, rank))
        pair.engine.step()
        for at in range(world):
            (local,) = torch.autograd.grad(mean_square(pair.reference, step, at), other)
            if at == rank:
                assert len(seen) == 1
                error = max(error, float((seen[0] - local).abs().max()))
            grads = torch.autograd.grad(
                mean_square(pair.reference, step, at), list(pair.reference.parameters()), allow_unused=True
            )
            for p, gradient in zip(pair.reference.parameters(), grads, strict=True):
                if gradient is None:
                    continue
                if p is other and step < 2:
                    gradient = gradient * 3
                if p is pair.reference.heads[0].bias:
                    gradient = gradient.clamp(-0.01, 0.01)
                gradient = gradient / world
                p.grad = gradient if p.grad is None else p.grad + gradient
        pair.update()
        if step == 1:
            handle.remove()
            seen.append(torch.zeros(0))
            handle = weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    return max(error, pair.finish())


def activation_hooks(rank: int, world: int, stage: int) -> float:
    """Hooks on activations, on modules in forward and in backward: they see and change what plain ones do."""
    pair = Pair.of(rank, world, stage)
    logs: dict[str, list[Tensor]] = {"model": [], "reference": []}
    for name in ("model", "reference"):
        net, log = getattr(pair, name), logs[name]
        net.blocks[0].register_forward_hook(lambda module, args, out: out * 2)
        net.blocks[1].register_full_backward_hook(
            lambda module, gin, gout, log=log: log.append(gout[0].clone())
        )
        net.blocks[1].up.register_full_backward_pre_hook(lambda module, gout: (gout[0] * 0.5,))

    def loss_of(net: Any, step: int, at: int, log: list[Tensor]) -> Tensor:
        out = net(features(step, 0, at))
        out.register_hook(lambda gradient: log.append(gradient.clone()))
        out.register_hook(lambda gradient: gradient * 1.5)
        return out.square().mean()

    for step in range(3):
        pair.engine.backward(loss_of(pair.engine, step, rank, logs["model"]))
        pair.engine.step()
        for at in range(world):
            log = logs["reference"]
            before = len(log)
            loss_of(pair.reference, step, at, log).backward()
            if at != rank:
                del log[before:]
        for p in pair.reference.parameters():
            if p.grad is not None:
                p.grad /= world
        pair.update()
    both = zip(logs["model"], logs["reference"], strict=True)
    return max(pair.finish(), *(float((a - b).abs().max()) for a, b in both))


# ---- windows ----------------------------------------------------------------------------------------


def window(pair: Pair, step: int, micros: int, divided_by: int, managed: bool = True) -> None:
    """`micros` backwards on both sides, each divided by `divided_by`."""
    for micro in range(micros):
        loss = mean_square(pair.engine, step, pair.rank, micro=micro)
        if managed:
            pair.engine.backward(loss)
        else:
            (loss / divided_by).backward()
        pair.everybody(
            lambda net, at, micro=micro: mean_square(net, step, at, micro=micro), factor=1 / divided_by
        )
        if micro < micros - 1:
            assert pair.engine.step() is None


def batch_size_changes(rank: int, world: int, stage: int) -> float:
    """`set_train_batch_size` between steps: 2, 4, 1 micro-batches."""
    pair = Pair.of(rank, world, stage, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    for step, steps in enumerate((2, 4, 1, 3)):
        if step:
            pair.engine.set_train_batch_size(4 * world * steps)
        assert pair.engine.gradient_accumulation_steps() == steps
        window(pair, step, steps, steps)
        assert not pair.engine.step().skipped
        pair.update()
    pair.engine.set_train_micro_batch_size(2)
    assert pair.engine.train_batch_size() == 2 * 3 * world
    window(pair, 9, 3, 3)
    pair.engine.step()
    pair.update()
    return pair.finish()


def window_cut_by_boundary(rank: int, world: int, stage: int) -> float:
    """The boundary is forced, before the last backward or after it; later windows are whole again."""
    pair = Pair.of(rank, world, stage, gradient_accumulation_steps=4)
    for step, (micros, when) in enumerate(
        [(4, ""), (2, "before"), (4, ""), (3, "after"), (1, "before"), (4, "")]
    ):
        if when == "before":
            pair.engine.set_gradient_accumulation_boundary(False)
        for micro in range(micros):
            last = micro == micros - 1
            if when == "before" and last:
                pair.engine.set_gradient_accumulation_boundary(True)
            pair.engine.backward(mean_square(pair.engine, step, rank, micro=micro))
            if when == "after" and last:
                pair.engine.set_gradient_accumulation_boundary(True)
            assert (pair.engine.step() is None) == (not last)
            pair.everybody(lambda net, at, m=micro, s=step: mean_square(net, s, at, micro=m), factor=1 / 4)
        pair.engine.set_gradient_accumulation_boundary(None)
        pair.update()
    return pair.finish()


def window_cut_by_step(rank: int, world: int, stage: int) -> float:
    """`optimizer.step()` is called early, in the middle of a window; the next one is whole."""
    pair = Pair.of(rank, world, stage, gradient_accumulation_steps=4)
    for step, micros in enumerate((4, 2, 4, 1, 4)):
        window(pair, step, micros, 4, managed=step != 3)
        pair.engine.step() if micros == 4 else pair.optimizer.step()
        pair.update()
    return pair.finish()


def unmanaged(rank: int, world: int, stage: int) -> float:
    """`managed_gradient_accumulation` false: `step` updates whenever it is called; windows of any length."""
    pair = Pair.of(rank, world, stage, gradient_accumulation_steps=3, managed_gradient_accumulation=False)
    for step, micros in enumerate((3, 1, 4)):
        for micro in range(micros):
            pair.engine.backward(mean_square(pair.engine, step, rank, micro=micro))
            pair.everybody(lambda net, at, m=micro, s=step: mean_square(net, s, at, micro=m), factor=1 / 3)
        assert pair.engine.step() is not None
        pair.update()
    assert pair.engine.global_steps == 3
    return pair.finish()


def no_sync_managed(rank: int, world: int, stage: int) -> float:
    """B 22: three of four micro-batches under `no_sync`, by the managed loop."""
    pair = Pair.of(rank, world, stage, gradient_accumulation_steps=4)
    for step in range(3):
        for micro in range(4):
            with pair.engine.no_sync() if micro < 3 else contextlib.nullcontext():
                pair.engine.backward(mean_square(pair.engine, step, rank, micro=micro))
                pair.everybody(
                    lambda net, at, m=micro, s=step: mean_square(net, s, at, micro=m), factor=1 / 4
                )
            pair.engine.step()
        pair.update()
    return pair.finish()


def weighted_by_tokens(rank: int, world: int, stage: int) -> float:
    """Micro-batches of very unequal weight, none at all on one rank, clipped by the norm of the weighted mean."""
    pair = Pair.of(rank, world, stage, gradient_accumulation_steps=2, gradient_clipping=0.05)
    weights = [[[1, 4000], [7, 2]], [[0, 0], [5, 3]], [[2, 0], [0, 1]]]
    for step, per_micro in enumerate(weights):
        for micro in range(2):
            tokens = per_micro[micro][rank]
            pair.engine.backward(mean_square(pair.engine, step, rank, micro=micro), tokens=tokens)
            result = pair.engine.step()
            for at in range(world):
                share = per_micro[micro][at] / sum(map(sum, per_micro))
                (mean_square(pair.reference, step, at, micro=micro) * share).backward()
        norm = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.05)
        assert abs(result.grad_norm - float(norm)) <= 1e-5 * float(norm)
        pair.update()
    return pair.finish()


def schedule_after(rank: int, world: int, stage: int) -> float:
    """F 65: a torch schedule built on the optimizer that `initialize` returned, with empty groups in it."""

    def groups(net: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [
                {"params": [], "lr": 1.0},
                {"params": list(net.blocks.parameters()), "lr": 0.2},
                {"params": list(net.heads.parameters()), "lr": 0.02, "momentum": 0.9},
                {"params": []},
            ],
            lr=0.1,
        )

    pair = Pair.of(rank, world, stage, optimizer_fn=groups)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for optimizer in (pair.optimizer, pair.expected)
    ]
    for step in range(4):
        mean_square(pair.model, step, rank).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.everybody(lambda net, at, s=step: mean_square(net, s, at))
        pair.update()
        for schedule in schedules:
            schedule.step()
        assert [g["lr"] for g in pair.optimizer.param_groups] == [g["lr"] for g in pair.expected.param_groups]
    return pair.finish()


def nothing_to_do(rank: int, world: int, stage: int) -> float:
    """`optimizer.step()` with no gradient anywhere changes nothing, however often; training goes on after it."""
    pair = Pair.of(rank, world, stage, optimizer_fn=adamw)
    for step in range(3):
        before = [pair.engine.full_fp32(p) for p in pair.model.parameters()]
        states = sum(len(state) for state in pair.optimizer.state.values())
        pair.optimizer.step()
        pair.optimizer.step()
        after = [pair.engine.full_fp32(p) for p in pair.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert sum(len(state) for state in pair.optimizer.state.values()) == states
        pair.engine.backward(mean_square(pair.engine, step, rank))
        pair.engine.step()
        pair.everybody(lambda net, at, s=step: mean_square(net, s, at))
        pair.update()
    return pair.finish()


def no_gradient_no_decay(rank: int, world: int, stage: int) -> float:
    """B 40: a missing gradient is zero where another rank has one; where none has, the parameter rests, with
    decay and with state. Head 1 is used by nobody, by rank 1 alone, by nobody."""
    pair = Pair.of(rank, world, stage, optimizer_fn=adamw, zero={"leaf_module": {"names": ["heads"]}})
    first = pair.engine.full_fp32(pair.model.heads[1].weight)
    for step in range(5):
        heads = [1 if step in (2, 3) and at == 1 else 0 for at in range(world)]
        pair.engine.backward(mean_square(pair.engine, step, rank, heads[rank]))
        pair.engine.step()
        pair.everybody(lambda net, at, s=step, heads=heads: mean_square(net, s, at, heads[at]))
        pair.update()
        rests = torch.equal(pair.engine.full_fp32(pair.model.heads[1].weight), first)
        assert rests == (step < 2)
        if step >= 2:
            steps = zeroshard.safe_get_full_optimizer_state(pair.model.heads[1].weight, "step")
            assert float(steps) == min(step - 1, 2)
    return pair.finish()


@pytest.mark.parametrize(
    "case",
    [
        joint_loss,
        teacher_engine,
        gradient_penalty,
        scaling_hooks,
        activation_hooks,
        batch_size_changes,
        window_cut_by_boundary,
        window_cut_by_step,
        unmanaged,
        no_sync_managed,
        weighted_by_tokens,
        schedule_after,
        nothing_to_do,
        no_gradient_no_decay,
    ],
    ids=lambda case: case.__name__,
)
@pytest.mark.parametrize("stage", STAGES)
def test_equal_to_plain_pytorch(ranks2: RankPool, stage: int, case: Callable[..., float]) -> None:
    assert max(ranks2.run(case, stage)) <= 1e-6


# ---- what cannot be is an error on all ranks --------------------------------------------------------


def no_tokens_at_all(rank: int, world: int, stage: int) -> tuple[float, float]:
    """A window in which no rank had a token: gradients are zero, and no NaN comes of it."""
    pair = Pair.of(rank, world, stage, optimizer_fn=lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    before = pair.engine.full_fp32(pair.model.heads[0].weight)
    pair.engine.backward(mean_square(pair.engine, 0, rank), tokens=0)
    result = pair.engine.step()
    after = pair.engine.full_fp32(pair.model.heads[0].weight)
    pair.engine.close()
    return float((after - before).abs().max()), result.grad_norm or 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_no_tokens_on_any_rank(ranks2: RankPool, stage: int) -> None:
    assert ranks2.run(no_tokens_at_all, stage) == [(0.0, 0.0)] * 2


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([Block(6, 5)])

    def forward(self, x: Tensor) -> Tensor:
        return self.block[0](x).square().mean()


def by_weight(rank: int, world: int, stage: int, gathered: bool) -> tuple[str, str]:
    pair = Pair.of(rank, world, stage, OneBlock)

    def penalised(net: Any, weight: Tensor, step: int, at: int) -> Tensor:
        loss = net(features(step, 0, at))
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        return loss + slope.square().sum()

    def act() -> None:
        for step in range(3):
            with pair.engine.gathered() if gathered else contextlib.nullcontext():
                pair.engine.backward(penalised(pair.engine, pair.model.block[0].up.weight, step, rank))
            pair.engine.step()
            pair.everybody(lambda net, at, s=step: penalised(net, net.block[0].up.weight, s, at))
            pair.update()

    kind, message = attempt(act)
    error = pair.finish()
    return kind, message if kind != "nothing" else str(error)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_penalty_on_the_gradient_by_a_weight(ranks2: RankPool, stage: int, gathered: bool) -> None:
    """A sharded weight cannot be an input of `autograd.grad`: an error that says so. Gathered, it can."""
    for kind, message in ranks2.run(by_weight, stage, gathered):
        if stage < 3 or gathered:
            assert kind == "nothing", message
            assert float(message) <= 1e-6
        else:
            assert kind == "ShardedAccessError"
            assert "'block.0.up.weight'" in message
            assert "engine.gathered" in message


class Derived(torch.optim.AdamW):
    """Torch runs the step hooks of this one twice, once an AdamW was made: around each `step` of the two classes.
    What comes after the inner one is part of the step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for part in group["params"]:
                if part.grad is not None:
                    part.data.mul_(0.99)
        return result


def derived(model: nn.Module) -> torch.optim.Optimizer:
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    return Derived(model.parameters(), lr=1e-2, eps=1e-3)


def stepped_by_a_subclass(rank: int, world: int, stage: int) -> tuple[float, int, int]:
    """Weighted by tokens, one step skipped: whatever is done twice shows."""
    pair = Pair.of(rank, world, stage, Net, derived)
    for number in range(3):
        bad = float("nan") if number == 1 else 1.0
        loss = pair.engine(features(number, 0, rank)).square().mean() * bad
        pair.engine.backward(loss, tokens=rank + 1)
        pair.engine.step()
        if number != 1:
            pair.everybody(
                lambda net, at, number=number: net(features(number, 0, at)).square().mean() * (at + 1) * 2 / 3
            )
            pair.update()
    return pair.distance(), pair.engine.global_steps, pair.engine.skipped_steps


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_whose_step_calls_that_of_its_base(ranks2: RankPool, stage: int) -> None:
    for error, steps, skipped in ranks2.run(stepped_by_a_subclass, stage):
        assert error <= 1e-6
        assert (steps, skipped) == (3, 1)
