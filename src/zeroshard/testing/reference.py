"""Plain PyTorch, trained in one process on the batches of all ranks: what every comparison is with.

Gradients of all ranks add up and are divided by their number: the mean over the whole batch. Under bf16 and fp16
there is a 16-bit copy of the model for compute, fp32 parameters for the update, and the loss scale as it begins.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.assembly import loss_scale_of
from zeroshard.config import Config, torch_optimizer
from zeroshard.lr_schedules import build_schedule
from zeroshard.mixed_precision import Precision
from zeroshard.optimizer import build_optimizer
from zeroshard.precision import cast_floating, squared_norm
from zeroshard.testing.loops import LOOPS, Window

__all__ = ["BatchFn", "LossFn", "ModelFn", "OptimizerFn", "Result", "Training", "call", "train_plain"]

ModelFn = Callable[[], nn.Module]
BatchFn = Callable[[int, int, int], Any]
LossFn = Callable[[Any], Tensor]
OptimizerFn = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on what, and how: all that the reference depends on."""

    model_fn: ModelFn
    batch_fn: BatchFn
    loss_fn: LossFn
    optimizer_fn: OptimizerFn | None
    """None is the optimizer of the config."""
    loop: str
    """One of `loops.LOOPS`."""
    steps: int
    world: int
    accumulation: int
    config: Config
    """Its optimizer, schedule, precision and clipping are mirrored."""

    def has_same_reference(self, other: Training) -> bool:
        """They differ at most in what plain PyTorch knows nothing of."""
        return self._mirrored() == other._mirrored()

    def _mirrored(self) -> tuple[object, ...]:
        config = self.config
        return (
            *(self.model_fn, self.batch_fn, self.loss_fn, self.optimizer_fn),
            *(self.loop, self.steps, self.world, self.accumulation),
            *(config.optimizer, config.scheduler, config.gradient_clipping),
            *(config.fp16, config.bf16, config.torch_autocast),
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """The parameters after training by name, and the mean loss of each step."""

    parameters: Mapping[str, Tensor]
    losses: tuple[float, ...]


_latest: list[tuple[Training, Result]] = []


def train_plain(training: Training) -> Result:
    """What plain PyTorch makes of it. The latest result is kept: the stages of a check share it, and those of a
    large model must not pile up."""
    for known, result in _latest:
        if known.has_same_reference(training):
            return result
    _latest.clear()
    result = _train(training)
    _latest.append((training, result))
    return result


def _train(training: Training) -> Result:
    torch.manual_seed(0)
    model = training.model_fn()
    config, precision = training.config, Precision.of(training.config)
    masters_are_narrow = config.bf16.bf16_master_weights_and_grads
    if masters_are_narrow:
        _cast(model, precision.compute)
    optimizer = training.optimizer_fn(model) if training.optimizer_fn else _of_config(model, config)
    schedule = _schedule(optimizer, config)
    separate = precision.compute is not None and not masters_are_narrow
    compute = _cast(copy.deepcopy(model), precision.compute) if separate else model
    pairs = list(zip(model.parameters(), compute.parameters(), strict=True)) if separate else []
    losses = []
    for step in range(training.steps):
        windows = [
            _PlainWindow(training, compute, pairs, precision, step=step, rank=rank)
            for rank in range(training.world)
        ]
        for window in windows:
            LOOPS[training.loop](window)
        _finish_gradients(model, windows, training)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        with torch.no_grad():
            for master, copy_ in pairs:
                copy_.copy_(master)
        found = [loss for window in windows for loss in window.losses]
        losses.append(sum(found) / len(found))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Result(parameters=parameters, losses=tuple(losses))


def _of_config(model: nn.Module, config: Config) -> Optimizer:
    choice = torch_optimizer(config.optimizer)
    assert choice is not None, "the caller gives an optimizer_fn when the config names no optimizer"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return build_optimizer(choice.name, choice.kwargs, trained, name_of)


def _schedule(optimizer: Optimizer, config: Config) -> Any:
    if config.scheduler.type is None:
        return None
    return build_schedule(config.scheduler.type, config.scheduler.params, optimizer)


class _PlainWindow(Window):
    """Collects the gradients of one rank, times the loss scale, in the `grad` of the fp32 parameters."""

    def __init__(
        self,
        training: Training,
        model: nn.Module,
        pairs: list[tuple[nn.Parameter, nn.Parameter]],
        precision: Precision,
        *,
        step: int,
        rank: int,
    ) -> None:
        """`pairs`: fp32 parameters with their 16-bit copies, where these are separate."""
        super().__init__(
            lambda micro: training.batch_fn(step, micro, rank),
            training.loss_fn,
            rank=rank,
            micro_batches=training.accumulation,
        )
        self.tokens = 0.0
        """All weights given to `managed_backward`."""
        self._model, self._pairs, self._precision = model, pairs, precision
        self._scale = loss_scale_of(training.config, precision).value

    def _forward(self, inputs: Any) -> Any:
        if self._precision.compute is not None:
            inputs = cast_floating(inputs, self._precision.compute)
        autocast = self._precision.autocast
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            return call(self._model, inputs)

    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        scaled = loss.float() * self._scale
        gradient = None if gradient is None else gradient.float()
        scaled.backward(gradient, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        _collect(self._pairs)

    def managed_backward(self, loss: Tensor, tokens: float | None = None) -> None:
        self.tokens += tokens or 0.0
        self.backward(loss.float() / self.micro_batches if tokens is None else loss.float() * tokens)

    def step(self) -> None:
        """The update is common to all ranks, and comes after the last of them."""

    managed_step = step

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def set_boundary(self, is_boundary: bool | None) -> None:
        """The window ends where the loop does."""


def _finish_gradients(model: nn.Module, windows: Iterable[_PlainWindow], training: Training) -> None:
    """Sums become means, without loss scale, and are clipped."""
    weight = sum(window.tokens for window in windows) or training.world
    scale = loss_scale_of(training.config, Precision.of(training.config)).value
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1.0 / weight / scale)
    if training.config.gradient_clipping:
        _clip(model, training.config.gradient_clipping)


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
    """Add the 16-bit copy's gradients to the fp32 parameters'."""
    for master, compute in pairs:
        if compute.grad is not None:
            gradient = compute.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            compute.grad = None


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """A mapping is keyword arguments, a tuple or list positional ones; anything else is the one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
