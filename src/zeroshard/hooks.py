"""The hooks on the user's model. They report to `passes` and decide nothing."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch.utils.hooks import RemovableHandle

from zeroshard.boundary import Boundary
from zeroshard.layout import Layout, Unit
from zeroshard.passes import Passes
from zeroshard.precision import cast_floating, tensors_in

__all__ = ["hook_gradient", "install", "is_compiled"]

_F = TypeVar("_F", bound=Callable[..., Any])


_REASON = (
    "zeroshard gathers, frees and casts here. Leave fullgraph=True off, or compile a block as a whole by "
    "torch.compile(block), whose hooks are outside of the graph"
)


def eager(hook: _F) -> _F:
    """Where `hook` is called, dynamo breaks the graph: it runs between compiled graphs, not in them."""
    return torch.compiler.disable(hook, reason=_REASON)  # type: ignore[no-any-return, no-untyped-call]


def _eager_alone(hook: _F) -> _F:
    """`eager`, but dynamo is not off in what `hook` calls, and so `_is_compiled_around` can tell."""
    hook._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return skip(hook)  # type: ignore[return-value]


def _is_compiled_around() -> bool:
    """The code that runs was called under torch.compile."""
    return callable(get_eval_frame_callback())


def install(
    modules: Mapping[str, nn.Module],
    layout: Layout,
    passes: Passes,
    boundary: Boundary,
    kept: Mapping[str, torch.dtype],
) -> list[RemovableHandle]:
    """Hook every unit's forward; the handles remove the hooks.

    `kept`: modules that compute in fp32 inside a model of another dtype, and that dtype.
    """
    handles: list[RemovableHandle] = []
    for path, dtype in kept.items():
        handles += _hook_kept(modules[path], dtype)
    units = {id(modules[unit.path]) for unit in layout.units}
    # Prepended later, so run earlier: `enter` comes before anything that could raise, and `leave` after.
    for unit in layout.units:
        if not boundary.does_nothing:
            handles += _hook_boundary(modules[unit.path], passes, boundary)
        handles += _hook_unit(modules[unit.path], unit, layout, passes, units)
    return handles


class _ModuleHooks:
    """Hooks that a deep copy of their module has as well. There they do nothing: its weights are its own, it may
    run on one rank only, be another engine's, or outlive this one."""

    _copied = False

    def __deepcopy__(self, memo: Any) -> _ModuleHooks:
        copied = object.__new__(type(self))
        copied._copied = True
        return copied


class _UnitHooks(_ModuleHooks):
    """Around the forward of one unit."""

    def __init__(self, unit: Unit, layout: Layout, passes: Passes, units: Collection[int]) -> None:
        """`units`: ids of the modules that are units."""
        self._buckets, self._passes, self._units = unit.buckets, passes, units
        self._freed = tuple(bucket for bucket in unit.buckets if not layout.buckets[bucket].resident)
        self._handled: list[BaseException | None] = []
        """Of each forward that runs: the exception that was being handled around it when it began."""

    @_eager_alone
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._copied:
            self._enter(module, _is_compiled_around())

    @eager
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._copied:
            self._leave((args, kwargs), output)

    @eager
    def _enter(self, module: nn.Module, compiling: bool) -> None:
        self._handled.append(sys.exc_info()[1])
        self._passes.enter(self._buckets, lambda: compiling or _runs_compiled(module, self._units))

    def _leave(self, inputs: Any, output: Any) -> None:
        passes = self._passes
        touched = bool(passes.touched_here)
        outputs = tensors_in(output) if self._freed or touched else []
        # An exception ends a forward too (early stop of a recomputation); its graph goes nowhere.
        around = self._handled.pop() if self._handled else None
        raised = output is None and sys.exc_info()[1] is not around
        may_save = (
            not raised
            and torch.is_grad_enabled()
            and (
                touched
                or not passes.untrained.issuperset(self._freed)
                or (bool(self._freed) and _any_requires_grad(inputs))
            )
        )
        passes.leave(self._freed, outputs, may_save)


def _hook_unit(
    module: nn.Module, unit: Unit, layout: Layout, passes: Passes, units: Collection[int]
) -> list[RemovableHandle]:
    hooks = _UnitHooks(unit, layout, passes, units)
    return [
        module.register_forward_pre_hook(hooks.before_forward, prepend=True, with_kwargs=True),
        module.register_forward_hook(hooks.after_forward, with_kwargs=True, always_call=True),
    ]


def is_compiled(module: nn.Module) -> bool:
    """By `module.compile()`, or as the wrapper that `torch.compile(module)` gives."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _runs_compiled(module: nn.Module, units: Collection[int]) -> bool:
    """A unit, or something in it that is no unit of its own, is compiled: a module, or a function it has."""
    own = [vars(module), *(vars(cls) for cls in type(module).__mro__ if cls is not nn.Module)]
    return (
        is_compiled(module)
        or any(_is_compiled_function(value) for names in own for value in names.values())
        or any(_runs_compiled(child, units) for child in module.children() if id(child) not in units)
    )


def _is_compiled_function(value: Any) -> bool:
    """Dynamo marks what it wraps, to compile it or to leave it alone."""
    return hasattr(value, "_torchdynamo_orig_callable") and not getattr(value, "_torchdynamo_disable", False)


def _any_requires_grad(inputs: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(inputs))


class _BoundaryHooks(_ModuleHooks):
    """Around the outermost forward: inputs and outputs cross the boundary."""

    def __init__(self, passes: Passes, boundary: Boundary) -> None:
        self._passes, self._boundary = passes, boundary
        self._entered: list[bool] = []
        """Of each forward that runs: it is the outermost one."""
        self._from_outside = False
        """So was the latest forward that recomputes nothing: recomputation is to do the same again."""

    @eager
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._copied:
            return None
        passes = self._passes
        if not passes.in_backward:
            self._from_outside = passes.is_outermost
        self._entered.append(self._from_outside and passes.is_outermost)
        return self._boundary.enter((args, kwargs), passes.in_backward) if self._entered[-1] else None

    @eager
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        crosses = not self._copied and bool(self._entered) and self._entered.pop()
        return self._boundary.leave(output, self._passes.in_backward) if crosses else None


def _hook_boundary(module: nn.Module, passes: Passes, boundary: Boundary) -> list[RemovableHandle]:
    hooks = _BoundaryHooks(passes, boundary)
    return [
        module.register_forward_pre_hook(hooks.before_forward, prepend=True, with_kwargs=True),
        module.register_forward_hook(hooks.after_forward, with_kwargs=True, always_call=True),
    ]


def _hook_kept(module: nn.Module, outside: torch.dtype) -> list[RemovableHandle]:
    """Let a module compute in fp32: cast what it gets, and cast back what it returns."""

    @eager
    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)

    @eager
    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, outside)

    return [
        module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True),
        module.register_forward_hook(after_forward),
    ]


def hook_gradient(
    parameter: nn.Parameter, name: str, bucket: int, index: int, passes: Passes, boundary: Boundary
) -> RemovableHandle:
    """Take the gradient of a parameter that requires grad, whenever it comes."""
    # A hook of a tensor is held where Python's garbage collector does not look, so it must not hold what holds the
    # tensor: an engine that nobody closed would stay for good.
    at_work = weakref.ref(passes), weakref.ref(boundary)

    def gradient_ready(parameter: torch.Tensor) -> None:
        passes, boundary = at_work[0](), at_work[1]()
        gradient = parameter.grad
        if gradient is not None and passes is not None and boundary is not None:
            parameter.grad = None
            boundary.check_scaled(name)
            passes.arrive(bucket, index, gradient)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(gradient_ready)  # type: ignore[no-untyped-call]
    return handle
