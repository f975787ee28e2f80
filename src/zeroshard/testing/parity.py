"""Proof of sameness: the same model, data, optimizer and loop under plain PyTorch and under zeroshard."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.config import parse
from zeroshard.testing.loops import LOOPS, Window
from zeroshard.testing.ranks import RankPool
from zeroshard.testing.reference import (
    BatchFn,
    LossFn,
    ModelFn,
    OptimizerFn,
    Result,
    Training,
    call,
    train_plain,
)

__all__ = ["BF16_TOLERANCE", "FP32_TOLERANCE", "Difference", "assert_parity", "measure_parity"]

FP32_TOLERANCE = 1e-6
BF16_TOLERANCE = 3e-2
"""Largest difference relative to the parameter's scale. Averaging over ranks in bf16 rounds each gradient once
more, by up to 2^-8 of it, so this only tells right from wrong; with `communication_data_type: fp32` the
reference is met to the last bits, and `FP32_TOLERANCE` can be asked for."""
SMALLEST_SCALE = 0.02
"""A usual standard deviation of initial weights. Parameters that begin at zero have no scale of their own yet:
theirs would be the few steps they moved, of which the order of a sum decides more than 1e-6."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The parameter that differs most from the reference."""

    parameter: str
    relative: float
    """max |p - reference| / max(0.02, max |reference|)."""
    steps: int
    losses: tuple[float, ...]
    """Loss of each step under zeroshard, averaged over ranks and micro-batches."""
    reference_losses: tuple[float, ...]


def assert_parity(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    config: Mapping[str, Any],
    *,
    optimizer_fn: OptimizerFn | None = None,
    loss_fn: LossFn | None = None,
    ranks: int = 2,
    steps: int = 5,
    tolerance: float | None = None,
    pool: RankPool | None = None,
    loop: str = "managed",
) -> Difference:
    """Train under plain PyTorch and under zeroshard; AssertionError when parameters differ too much.

    Args:
        model_fn: makes the model; called under a fixed seed. All functions must be importable (defined at the
            top level of a module), since they run in worker processes.
        batch_fn: `(step, micro_batch, rank) -> inputs` of one forward: a tensor, a tuple of positional or a
            dict of keyword arguments. The same call must give the same data in every process.
        config: the DeepSpeed config; its gradient_accumulation_steps, clipping, precision and scheduler are
            mirrored, and its optimizer when there is no `optimizer_fn`.
        optimizer_fn: makes the optimizer from the model; default the config's, or AdamW(lr=1e-3).
        loss_fn: from the model's output to a scalar; default: the output itself, its `.loss` or `["loss"]`.
        ranks: worker processes. `pool` reuses one that exists.
        loop: how the training loop is written, one of `loops.LOOPS`.
        tolerance: default `FP32_TOLERANCE`, or `BF16_TOLERANCE` when the config asks for a 16-bit dtype.

    Returns the largest difference found.
    """
    difference = measure_parity(
        model_fn,
        batch_fn,
        config,
        optimizer_fn=optimizer_fn,
        loss_fn=loss_fn,
        ranks=ranks,
        steps=steps,
        pool=pool,
        loop=loop,
    )
    limit = tolerance if tolerance is not None else (BF16_TOLERANCE if _is_16_bit(config) else FP32_TOLERANCE)
    if not difference.relative <= limit:
        raise AssertionError(
            f"after {steps} steps of the {loop} loop on {ranks} ranks, parameter {difference.parameter!r} differs "
            f"from plain PyTorch by {difference.relative:.3g} of its scale (limit {limit:g}), with config "
            f"{json.dumps(dict(config))}"
        )
    return difference


def measure_parity(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    config: Mapping[str, Any],
    *,
    optimizer_fn: OptimizerFn | None = None,
    loss_fn: LossFn | None = None,
    ranks: int = 2,
    steps: int = 5,
    pool: RankPool | None = None,
    timeout: float = 300.0,
    loop: str = "managed",
) -> Difference:
    """As `assert_parity`, without the judgement."""
    if loop not in LOOPS:
        raise ValueError(f"loop {loop!r} is not known; choose one of {', '.join(LOOPS)}")
    own = RankPool(ranks) if pool is None else pool
    try:
        args = (model_fn, batch_fn, dict(config), optimizer_fn, loss_fn or _loss_of, steps, loop)
        found: list[Difference] = own.run(_compare, *args, timeout=timeout)
        worst = max(found, key=lambda difference: difference.relative)
        by_step = zip(*(difference.losses for difference in found), strict=True)
        return dataclasses.replace(worst, losses=tuple(sum(losses) / len(found) for losses in by_step))
    finally:
        if pool is None:
            own.close()


def _compare(
    rank: int,
    world: int,
    model_fn: ModelFn,
    batch_fn: BatchFn,
    config: Mapping[str, Any],
    optimizer_fn: OptimizerFn | None,
    loss_fn: LossFn,
    steps: int,
    loop: str,
) -> Difference:
    known = parse(config)
    batch = known.batch_on(world, "the ranks of this comparison")
    if optimizer_fn is None and known.optimizer.type is None:
        optimizer_fn = _adamw
    training = Training(
        model_fn=model_fn,
        batch_fn=batch_fn,
        loss_fn=loss_fn,
        optimizer_fn=optimizer_fn,
        loop=loop,
        steps=steps,
        world=world,
        accumulation=batch.accumulation_steps,
        config=known,
    )
    reference = train_plain(training)
    found = _train_engine(training, config, rank)
    name, relative = _largest(found.parameters, reference.parameters)
    return Difference(
        parameter=name,
        relative=relative,
        steps=steps,
        losses=found.losses,
        reference_losses=reference.losses,
    )


class _EngineWindow(Window):
    """The calls of the engine and of the user's optimizer."""

    def __init__(self, engine: Any, training: Training, *, step: int, rank: int) -> None:
        super().__init__(
            lambda micro: training.batch_fn(step, micro, rank),
            training.loss_fn,
            rank=rank,
            micro_batches=engine.gradient_accumulation_steps(),
        )
        self._engine = engine

    def _forward(self, inputs: Any) -> Any:
        return call(self._engine, inputs)

    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        loss.backward(gradient, retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self._engine.optimizer.step()
        if self._engine.lr_scheduler is not None:
            self._engine.lr_scheduler.step()
        self._engine.optimizer.zero_grad()

    def managed_backward(self, loss: Tensor, tokens: float | None = None) -> None:
        self._engine.backward(loss, tokens=tokens)

    def managed_step(self) -> None:
        self._engine.step()

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._engine.no_sync()
        return context

    def set_boundary(self, is_boundary: bool | None) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary)


def _train_engine(training: Training, config: Mapping[str, Any], rank: int) -> Result:
    from zeroshard.initialization import initialize

    torch.manual_seed(0)
    model = training.model_fn()
    optimizer = training.optimizer_fn(model) if training.optimizer_fn else None
    engine, _, _, _ = initialize(model=model, optimizer=optimizer, config=dict(config))
    losses = []
    for step in range(training.steps):
        window = _EngineWindow(engine, training, step=step, rank=rank)
        LOOPS[training.loop](window)
        losses.append(sum(window.losses) / len(window.losses))
    masters = {name: engine.full_fp32(parameter) for name, parameter in model.named_parameters()}
    engine.close()
    return Result(parameters=masters, losses=tuple(losses))


def _largest(masters: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[str, float]:
    worst, relative = "", 0.0
    for name, expected in reference.items():
        if not expected.numel():
            continue
        scale = max(float(expected.abs().max()), SMALLEST_SCALE)
        value = float((masters[name].double() - expected.double()).abs().max()) / scale
        if not value <= relative or not worst:  # NaN is the worst of all
            worst, relative = name, value
    return worst, relative


def _loss_of(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"the model's output ({type(output).__name__}) is not a scalar loss; pass loss_fn")
    return loss


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _is_16_bit(config: Mapping[str, Any]) -> bool:
    sections = (config.get(name) or {} for name in ("bf16", "fp16", "torch_autocast"))
    return any(section.get("enabled", False) for section in sections)
