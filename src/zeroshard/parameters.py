"""Reading and editing the states of a parameter, under the names that DeepSpeed scripts use.

All take a parameter of a model that an engine holds. The `full` ones are collectives: every rank calls them. See
`zeroshard.access` for what can be read when.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zeroshard.errors import ShardedAccessError
from zeroshard.guard import has_engine, home_of

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


def _access(parameter: nn.Parameter) -> Any:
    if not isinstance(parameter, Tensor):
        raise ShardedAccessError(
            f"a state is read and set by its parameter; got {type(parameter).__name__}. Pass the parameter itself, "
            f"such as model.head.weight, not its name or its module"
        )
    return home_of(parameter).access if has_engine(parameter) else None


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of what the optimizer updates, in the parameter's shape; None when no engine holds it."""
    access = _access(param)
    return None if access is None else access.full_fp32(param)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace it on all ranks. The weights that the model computes with follow at once."""
    access = _access(param)
    if access is not None:
        access.set_full_fp32(param, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The averaged gradient between backward and step, without loss scale; None when no rank has one.

    Of a parameter that no engine holds, its `.grad`.
    """
    access = _access(param)
    return param.grad if access is None else access.full_grad(param)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace it on all ranks, also where there was none."""
    access = _access(param)
    if access is not None:
        access.set_full_grad(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of one entry of the optimizer's state, such as `exp_avg`. StateError when there is none yet."""
    access = _access(param)
    return None if access is None else access.full_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace it on all ranks."""
    access = _access(param)
    if access is not None:
        access.set_full_state(param, value, optim_state_key)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of the fp32 values, 1-D, not a copy."""
    access = _access(param)
    return None if access is None else access.local_fp32(param)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's elements. Every rank calls it."""
    access = _access(param)
    if access is not None:
        access.set_local_fp32(param, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of the reduced gradient, 1-D, not a copy; None when there is none."""
    access = _access(param)
    return None if access is None else access.local_grad(param)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's elements of a gradient that there is."""
    access = _access(param)
    if access is not None:
        access.set_local_grad(param, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's elements of one entry of the optimizer's state, not a copy."""
    access = _access(param)
    return None if access is None else access.local_state(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's elements of it."""
    access = _access(param)
    if access is not None:
        access.set_local_state(param, value, optim_state_key)
