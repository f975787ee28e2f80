"""What DeepSpeed puts on parameters and its functions over them, as views of where zeroshard has the parameter.

A sharded parameter's class answers `ds_shape` and its like (`guard.ShardedParameter`). One whose weights are here
has the class that its user gave it, so what stays true meanwhile is put on the parameter itself.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard import zero
from zeroshard.guard import Status as ZeroParamStatus
from zeroshard.guard import home_of
from zeroshard.parameters import safe_get_full_grad, safe_set_full_grad

__all__ = [
    "GatheredParameters",
    "ZeroParamStatus",
    "ZeroParamType",
    "is_zero_param",
    "mark",
    "restore_init_context",
    "safe_update_full_grad_vectorized",
    "shutdown_init_context",
    "unmark",
    "unwrap_model_for_generation",
    "z3_leaf_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


class ZeroParamType(enum.Enum):
    """What a parameter is. Remote ones are not there yet."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class GatheredParameters(zero.GatheredParameters):
    """`zeroshard.zero.GatheredParameters`, with DeepSpeed's rule for what is not sharded: left alone.

    Lists made from a set, in another order on each rank, may have buffers among them; others have None where a
    layer has no bias. Below stage 3 all ranks may edit all that they have; `modifier_rank` makes one's count.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[Any],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, Tensor):
            params = [params]
        sharded = [entry for entry in params if isinstance(entry, Tensor) and home_of(entry) is not None]
        if modifier_rank is None:
            sharded = [entry for entry in sharded if is_zero_param(entry) or home_of(entry).buffer is None]
        super().__init__(sharded, modifier_rank, fwd_module, enabled)


_NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "partition_numel")


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters of a stage-3 engine what DeepSpeed's have while their weights are here."""
    for parameter in parameters:
        home = home_of(parameter)
        if home is not None:
            numel = home.shape.numel()
            known = (home.number, home.shape, numel, ZeroParamStatus.AVAILABLE, home.piece)
            part = functools.partial(
                _partition_numel, numel, home.shards
            )  # gathered parameters may be pickled
            parameter.__dict__.update(zip(_NAMES, (*known, part), strict=True))


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Take it away again."""
    for parameter in parameters:
        for name in _NAMES:
            parameter.__dict__.pop(name, None)


def _partition_numel(numel: int, shards: int) -> int:
    return -(-numel // shards)


def is_zero_param(parameter: Any) -> bool:
    """It is, or will be, sharded."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """`fn` itself: zeroshard's `Init` does not change what torch's constructors make."""
    return fn


def shutdown_init_context() -> None:
    """Nothing to do: `Init` patches nothing."""


restore_init_context = shutdown_init_context


def z3_leaf_parameter(parameter: Any) -> bool:
    """False: leaves are known by their modules here (`z3_leaf_module`)."""
    return False


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], update_fn: Callable[[Tensor, nn.Parameter], Tensor | None]
) -> None:
    """Replace each full gradient by `update_fn(gradient, parameter)`, where that is not None. All ranks call it."""
    for parameter in params:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            changed = update_fn(gradient, parameter)
            if changed is not None:
                safe_set_full_grad(parameter, changed)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The engine's module with all its weights here. All ranks enter and leave."""
    with model.unwrap_for_generation() as module:
        yield module
