"""Odds and ends of `deepspeed.runtime` and `deepspeed.utils` that scripts import."""

from __future__ import annotations

import bisect
import enum
import gc
import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from zeroshard.compat.accelerator import get_accelerator
from zeroshard.compat.comm import get_rank
from zeroshard.compat.messages import logger
from zeroshard.config import parse
from zeroshard.errors import StateError
from zeroshard.guard import has_engine
from zeroshard.lr_schedules import SCHEDULES
from zeroshard.monitor import Monitor

__all__ = [
    "VALID_LR_SCHEDULES",
    "MonitorMaster",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "OnDevice",
    "ZeroStageEnum",
    "clip_grad_norm_",
    "empty_cache",
    "ensure_directory_exists",
    "get_caller_func",
    "get_global_norm",
    "instrument_w_nvtx",
    "is_compile_supported",
    "memory_status",
    "move_to_device",
    "partition_balanced",
    "see_memory_usage",
    "set_random_seed",
]

__git_hash__ = __git_branch__ = "zeroshard"
VALID_LR_SCHEDULES = list(SCHEDULES)


class ZeroStageEnum(enum.IntEnum):
    """Stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, enum.Enum):
    """Where a state may live."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """States that `offload_states` names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


@contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """Inside, torch makes tensors on `device`, floating-point ones in `dtype` unless told otherwise."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def is_compile_supported() -> bool:
    return True


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` itself: the engine's own steps carry profiler ranges."""
    return func


def get_caller_func(frame: int = 3) -> str:
    """The name of the function `frame` calls up."""
    stack = inspect.stack(0)
    return stack[min(frame, len(stack) - 1)].function


# ---- memory ---------------------------------------------------------------------------------------------


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log, on rank 0 and only with `force`, what the device and the host hold, in GB."""
    if not force or get_rank() != 0:
        return
    gc.collect()
    device = get_accelerator()
    used = (device.total_memory() - device.available_memory()) / 2**30
    allocated, peak = device.memory_allocated() / 2**30, device.max_memory_allocated() / 2**30
    logger.info(
        f"{message}: allocated {allocated:.2f} GB (peak {peak:.2f} GB), in use on {device.device_name()} "
        f"{used:.2f} GB of {device.total_memory() / 2**30:.2f} GB"
    )
    device.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """`see_memory_usage` on one rank, by default on rank 0."""
    if get_rank() == max(print_rank, 0):
        see_memory_usage(msg, force=True)


def empty_cache() -> None:
    get_accelerator().empty_cache()


# ---- numbers --------------------------------------------------------------------------------------------


def set_random_seed(seed: int) -> None:
    """Of Python's, NumPy's (where it is installed) and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, mpu: Any = None) -> Tensor:
    """torch's, for plain parameters. Those of an engine, which leaves no gradients on them, are a StateError."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(has_engine(parameter) for parameter in given):
        raise StateError(
            "clip_grad_norm_ of parameters that an engine trains: their gradients are in the engine, and nothing "
            "would be clipped. Set gradient_clipping in the config, or call engine.clip_grad_norm_(max_norm)"
        )
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)


def get_global_norm(norm_list: Sequence[float]) -> float:
    """The L2 norm of norms."""
    return math.hypot(*norm_list)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of contiguous parts of which the heaviest is as light as can be."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    def bounds(limit: float) -> list[int] | None:
        found = [0]
        for _ in range(num_parts):
            found.append(bisect.bisect_right(sums, sums[found[-1]] + limit + 1e-9) - 1)
        return found if found[-1] == len(weights) else None

    # The heaviest part is the sum of a run of items.
    runs = sorted({stop - start for i, start in enumerate(sums) for stop in sums[i:]})
    low, high = 0, len(runs) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if bounds(runs[middle]) else (middle + 1, high)
    best = bounds(runs[low])
    assert best is not None
    return best


# ---- odds and ends --------------------------------------------------------------------------------------


def ensure_directory_exists(filename: str) -> None:
    """Make the directory that the file is to be in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Tensor], bool] | None = None) -> Any:
    """A nested container with its tensors on `device`; of those only that `criterion_func` accepts."""

    def move(leaf: Any) -> Any:
        moves = isinstance(leaf, Tensor) and (criterion_func is None or criterion_func(leaf))
        return leaf.to(device) if moves else leaf

    return tree_map(move, item)


def MonitorMaster(monitor_config: Any) -> Monitor:
    """Writes events to the monitors of a config, on rank 0: `write_events([(name, value, step), ...])`."""
    return Monitor.of(parse(monitor_config), get_rank())
