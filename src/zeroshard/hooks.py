"""The hooks on the user's model. They report to the executor and decide nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.boundary import Boundary
from zeroshard.executor import Executor
from zeroshard.layout import Layout, Unit
from zeroshard.precision import cast_floating, tensors_in

__all__ = ["hook_gradient", "install"]


def install(
    modules: Mapping[str, nn.Module],
    layout: Layout,
    executor: Executor,
    boundary: Boundary,
    kept: Mapping[str, torch.dtype],
) -> list[RemovableHandle]:
    """Hook every unit's forward; the handles remove the hooks.

    `kept`: modules that compute in fp32 inside a model of another dtype, and that dtype.
    """
    handles: list[RemovableHandle] = []
    for path, dtype in kept.items():
        handles += _hook_kept(modules[path], dtype)
    # Prepended later, so run earlier: `enter` comes before anything that could raise, and `leave` after.
    for unit in layout.units:
        if not boundary.does_nothing:
            handles += _hook_boundary(modules[unit.path], executor, boundary)
        handles += _hook_unit(modules[unit.path], unit, layout, executor)
    return handles


def _hook_unit(module: nn.Module, unit: Unit, layout: Layout, executor: Executor) -> list[RemovableHandle]:
    freed = tuple(bucket for bucket in unit.buckets if not layout.buckets[bucket].resident)

    handled: list[BaseException | None] = []
    """Of each forward that runs: the exception that was being handled around it when it began."""

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        handled.append(sys.exc_info()[1])
        executor.enter(unit.buckets)

    def after_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        touched = bool(executor.touched_here)
        outputs = tensors_in(output) if freed or touched else []
        # An exception ends a forward too (early stop of a recomputation); its graph goes nowhere.
        around = handled.pop() if handled else None
        raised = output is None and sys.exc_info()[1] is not around
        may_save = (
            not raised
            and torch.is_grad_enabled()
            and (
                touched
                or not executor.untrained.issuperset(freed)
                or (bool(freed) and _any_requires_grad((args, kwargs)))
            )
        )
        executor.leave(freed, outputs, may_save)

    return [
        module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True),
        module.register_forward_hook(after_forward, with_kwargs=True, always_call=True),
    ]


def _any_requires_grad(inputs: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(inputs))


def _hook_boundary(module: nn.Module, executor: Executor, boundary: Boundary) -> list[RemovableHandle]:
    entered: list[bool] = []
    """Of each forward that runs: it is the outermost one."""
    from_outside = False
    """So was the latest forward that recomputes nothing: recomputation is to do the same again."""

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        nonlocal from_outside
        if not executor.in_backward:
            from_outside = executor.is_outermost
        entered.append(from_outside and executor.is_outermost)
        return boundary.enter((args, kwargs), executor.in_backward) if entered[-1] else None

    def after_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return boundary.leave(output, executor.in_backward) if entered and entered.pop() else None

    return [
        module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True),
        module.register_forward_hook(after_forward, with_kwargs=True, always_call=True),
    ]


def _hook_kept(module: nn.Module, outside: torch.dtype) -> list[RemovableHandle]:
    """Let a module compute in fp32: cast what it gets, and cast back what it returns."""

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, outside)

    return [
        module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True),
        module.register_forward_hook(after_forward),
    ]


def hook_gradient(
    parameter: nn.Parameter, name: str, bucket: int, index: int, executor: Executor, boundary: Boundary
) -> RemovableHandle:
    """Take the gradient of a parameter that requires grad, whenever it comes."""

    def gradient_ready(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = None
            boundary.check_scaled(name)
            executor.arrive(bucket, index, gradient)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(gradient_ready)  # type: ignore[no-untyped-call]
    return handle
