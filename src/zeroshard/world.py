"""Who is in the run: the process group, the device, and where each number came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroshard.errors import CommError

__all__ = ["TORCHRUN", "VISIBLE_DEVICES", "World", "join"]

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What its environment has of a run."""
VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
}
"""By type of device: the variable that says which of them a process sees."""
_OTHER_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "MPICH",
    "SLURM_NTASKS": "Slurm",
    "MPI_LOCALNRANKS": "Intel MPI",
}


@dataclass(frozen=True, kw_only=True)
class World:
    """The data-parallel world this process belongs to."""

    rank: int
    size: int
    size_origin: str
    """Where the size came from, for messages."""
    device: torch.device
    group: dist.ProcessGroup | None
    """None when there is one process and no group."""


def join(backend: str | None = None, timeout: timedelta | None = None) -> World:
    """Join the run: the group that exists, else the one torchrun's environment describes, else alone.

    A group that is made is of `backend`, by default the device's own, with `timeout`, by default torch's. Raises
    CommError when the environment says there are several processes but not how to meet them.
    """
    if dist.is_available() and dist.is_initialized():
        return _of_group("the torch.distributed process group")
    env = os.environ
    present = [name for name in TORCHRUN if name in env]
    if len(present) == len(TORCHRUN):
        device = _local_device(env)
        backend = backend or dist.get_default_backend_for_device(device)
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)
        dist.init_process_group(backend, timeout=timeout)
        return _of_group("WORLD_SIZE in the environment")
    _refuse_half_a_launch(env, present)
    return World(
        rank=0, size=1, size_origin="no launcher: one process", device=_local_device(env), group=None
    )


def _of_group(origin: str) -> World:
    group = dist.group.WORLD
    assert group is not None
    on_cpu = dist.get_backend(group) == "gloo"
    device = torch.device("cpu") if on_cpu else _local_device(os.environ)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return World(
        rank=dist.get_rank(group),
        size=dist.get_world_size(group),
        size_origin=origin,
        device=device,
        group=group,
    )


def _local_device(env: Mapping[str, str]) -> torch.device:
    """This process's accelerator, by LOCAL_RANK; CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":  # no float64 and no process group of its own
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = int(env.get("LOCAL_RANK", torch.accelerator.current_device_index()))
    if index >= count:
        raise CommError(
            f"LOCAL_RANK is {index} but this host shows {count} {accelerator.type} device(s). Start at most "
            f"{count} processes per host, or make more devices visible."
        )
    return torch.device(accelerator.type, index)


def _refuse_half_a_launch(env: Mapping[str, str], present: list[str]) -> None:
    missing = ", ".join(name for name in TORCHRUN if name not in env)
    if _as_int(env.get("WORLD_SIZE")) > 1 or (present and _as_int(env.get("RANK")) > 0):
        shown = ", ".join(f"{name}={env[name]}" for name in present)
        raise CommError(
            f"the environment has {shown} but not {missing}, so the processes of this run cannot meet. Start "
            f"it with `zeroshard run --nproc N script.py` or torchrun, or call "
            f"torch.distributed.init_process_group before `initialize`."
        )
    for name, launcher in _OTHER_LAUNCHERS.items():
        if _as_int(env.get(name)) > 1:
            raise CommError(
                f"{launcher} started {env[name]} processes ({name}={env[name]}) but {missing} are not set, and "
                f"each would train alone. Start with `zeroshard run --nproc N script.py` or torchrun, or set "
                f"those variables, or call torch.distributed.init_process_group before `initialize`."
            )


def _as_int(text: str | None) -> int:
    try:
        return int(text) if text is not None else 0
    except ValueError:
        return 0
