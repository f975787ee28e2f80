"""Proof of sameness: the same model, data and optimizer under plain PyTorch and under zeroshard.

The reference is one process that sees every rank's batches one after the other and adds up their gradients,
divided by ranks and micro-batches: the mean over the whole batch. Under bf16 and fp16 it is the same with a
16-bit copy of the model for compute, fp32 parameters for the update, and the loss scale as it begins.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.assembly import loss_scale_of
from zeroshard.config import parse, resolve_batch
from zeroshard.mixed_precision import Precision
from zeroshard.precision import cast_floating, squared_norm
from zeroshard.testing.ranks import RankPool

__all__ = ["BF16_TOLERANCE", "FP32_TOLERANCE", "Difference", "assert_parity", "measure_parity"]

FP32_TOLERANCE = 1e-6
BF16_TOLERANCE = 3e-2
"""Largest difference relative to the parameter's scale. Averaging over ranks in bf16 rounds each gradient once
more, by up to 2^-8 of it, so this only tells right from wrong; with `communication_data_type: fp32` the
reference is met to the last bits, and `FP32_TOLERANCE` can be asked for."""
SMALLEST_SCALE = 0.02
"""A usual standard deviation of initial weights. Parameters that begin at zero have no scale of their own yet:
theirs would be the few steps they moved, of which the order of a sum decides more than 1e-6."""


ModelFn = Callable[[], nn.Module]
BatchFn = Callable[[int, int, int], Any]
LossFn = Callable[[Any], Tensor]
OptimizerFn = Callable[[nn.Module], Optimizer]


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
) -> Difference:
    """Train under plain PyTorch and under zeroshard; AssertionError when parameters differ too much.

    Args:
        model_fn: makes the model; called under a fixed seed. All functions must be importable (defined at the
            top level of a module), since they run in worker processes.
        batch_fn: `(step, micro_batch, rank) -> inputs` of one forward: a tensor, a tuple of positional or a
            dict of keyword arguments. The same call must give the same data in every process.
        config: the DeepSpeed config; its gradient_accumulation_steps, clipping and precision are mirrored.
        optimizer_fn: makes the optimizer from the model; default AdamW(lr=1e-3).
        loss_fn: from the model's output to a scalar; default: the output itself, its `.loss` or `["loss"]`.
        ranks: worker processes. `pool` reuses one that exists.
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
    )
    limit = tolerance if tolerance is not None else (BF16_TOLERANCE if _is_16_bit(config) else FP32_TOLERANCE)
    if not difference.relative <= limit:
        raise AssertionError(
            f"after {steps} steps on {ranks} ranks, parameter {difference.parameter!r} differs from plain PyTorch "
            f"by {difference.relative:.3g} of its scale (limit {limit:g}), with config {json.dumps(dict(config))}"
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
) -> Difference:
    """As `assert_parity`, without the judgement."""
    own = RankPool(ranks) if pool is None else pool
    try:
        args = (model_fn, batch_fn, dict(config), optimizer_fn or _adamw, loss_fn or _loss_of, steps)
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
    optimizer_fn: OptimizerFn,
    loss_fn: LossFn,
    steps: int,
) -> Difference:
    known = parse(config)
    batch = resolve_batch(
        known.train_batch_size,
        known.train_micro_batch_size_per_gpu,
        known.gradient_accumulation_steps,
        world,
        "the ranks of this comparison",
        allow_unset=True,
    )
    precision = Precision.of(known)
    plain = _Plain(
        world=world,
        accumulation=batch.accumulation_steps,
        clipping=known.gradient_clipping,
        compute=precision.compute,
        autocast=precision.autocast,
        masters=known.bf16.bf16_master_weights_and_grads,
        loss_scale=loss_scale_of(known, precision).value,
    )
    expected, reference_losses = _reference(model_fn, batch_fn, optimizer_fn, loss_fn, steps, plain)
    torch.manual_seed(0)
    masters, losses = _train_engine(model_fn(), batch_fn, config, optimizer_fn, loss_fn, steps, rank)
    name, relative = _largest(masters, expected)
    return Difference(
        parameter=name,
        relative=relative,
        steps=steps,
        losses=tuple(losses),
        reference_losses=tuple(reference_losses),
    )


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """The settings that the reference mirrors."""

    world: int
    accumulation: int
    clipping: float
    compute: torch.dtype | None
    autocast: torch.dtype | None
    masters: bool
    """The parameters themselves are of the compute dtype: no fp32 copy."""
    loss_scale: float
    """The first one: a comparison is over steps in which it does not move."""


@functools.lru_cache(maxsize=1)  # the stages of one check share it; a large model must not pile up
def _reference(
    model_fn: ModelFn,
    batch_fn: BatchFn,
    optimizer_fn: OptimizerFn,
    loss_fn: LossFn,
    steps: int,
    plain: _Plain,
) -> tuple[dict[str, Tensor], list[float]]:
    """What plain PyTorch makes of it: the parameters after training, and the losses."""
    torch.manual_seed(0)
    model = model_fn()
    losses = _train_plain(model, batch_fn, optimizer_fn, loss_fn, steps, plain)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses


def _train_engine(
    model: nn.Module,
    batch_fn: BatchFn,
    config: Mapping[str, Any],
    optimizer_fn: OptimizerFn,
    loss_fn: LossFn,
    steps: int,
    rank: int,
) -> tuple[dict[str, Tensor], list[float]]:
    from zeroshard.initialization import initialize

    engine, _, _, _ = initialize(model=model, optimizer=optimizer_fn(model), config=dict(config))
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            loss = loss_fn(_call(engine, batch_fn(step, micro, rank)))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        losses.append(total / engine.gradient_accumulation_steps())
    masters = {name: engine.full_fp32(parameter) for name, parameter in model.named_parameters()}
    engine.close()
    return masters, losses


def _train_plain(
    model: nn.Module,
    batch_fn: BatchFn,
    optimizer_fn: OptimizerFn,
    loss_fn: LossFn,
    steps: int,
    plain: _Plain,
) -> list[float]:
    """Train `model` in this process on all ranks' batches; the losses of each step, averaged."""
    if plain.masters:
        _cast(model, plain.compute)
    optimizer = optimizer_fn(model)
    separate = plain.compute is not None and not plain.masters
    compute = _cast(copy.deepcopy(model), plain.compute) if separate else model
    pairs = list(zip(model.parameters(), compute.parameters(), strict=True))
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(plain.accumulation):
            for rank in range(plain.world):
                inputs = batch_fn(step, micro, rank)
                if plain.compute is not None:
                    inputs = cast_floating(inputs, plain.compute)
                with torch.autocast("cpu", dtype=plain.autocast, enabled=plain.autocast is not None):
                    loss = loss_fn(_call(compute, inputs))
                (loss.float() / plain.accumulation * plain.loss_scale).backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach()) / plain.accumulation
                if separate:
                    _collect(pairs)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / plain.world / plain.loss_scale)
        if plain.clipping:
            _clip(model, plain.clipping)
        optimizer.step()
        optimizer.zero_grad()
        if separate:
            with torch.no_grad():
                for master, copy_ in pairs:
                    copy_.copy_(master)
        losses.append(total / plain.world)
    return losses


def _cast(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The parameters in `dtype`. zeroshard does not cast buffers, so the reference does not either."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and dtype is not None:
                parameter.data = parameter.to(dtype)
    return model


def _clip(model: nn.Module, limit: float) -> None:
    """As `torch.nn.utils.clip_grad_norm_`, whose fp32 norm is off by 1e-3 for large tensors on the CPU."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(sum(squared_norm(g.reshape(-1)) for g in gradients)) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(limit / (norm + 1e-6), 1.0))


def _collect(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Add the bf16 copy's gradients to the fp32 parameters'."""
    for master, compute in pairs:
        if compute.grad is not None:
            gradient = compute.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            compute.grad = None


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


def _call(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


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
