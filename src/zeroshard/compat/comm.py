"""`deepspeed.comm` and `deepspeed.utils.groups`: torch.distributed, under the names and arguments they have there.

DeepSpeed's collectives take arguments for its logger (`prof`, `log_name`, `debug`), which are dropped here: the
engine's own collectives are logged by the config's `comms_logger`. All parallelism is data parallelism, so every
other group is a rank by itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.comm import configure_log, logged_operations
from zeroshard.comm.torch_backend import all_gather_single
from zeroshard.compat.messages import logger
from zeroshard.compat.names import COLLECTIVES
from zeroshard.config import parse
from zeroshard.errors import CommError, StateError
from zeroshard.world import join

_FOR_THE_LOGGER = ("prof", "log_name", "debug")


def _plain(name: str) -> Callable[..., Any]:
    """A function of torch.distributed that also takes, and drops, what is for DeepSpeed's logger."""
    target = getattr(dist, name)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        for key in _FOR_THE_LOGGER:
            kwargs.pop(key, None)
        return target(*args, **kwargs)

    return call


globals().update({name: _plain(name) for name in COLLECTIVES})


def all_gather_coalesced(
    output_tensors: list[Tensor],
    input_tensors: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather each input into the output at its place."""
    return _each(
        [
            functools.partial(all_gather_single, output, given, group=group, async_op=async_op)
            for output, given in zip(output_tensors, input_tensors, strict=True)
        ]
    )


def all_reduce_coalesced(
    tensors: list[Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Reduce each tensor in place."""
    return _each(
        [
            functools.partial(dist.all_reduce, tensor, op=op, group=group, async_op=async_op)
            for tensor in tensors
        ]
    )


def _each(calls: list[Callable[[], Any]]) -> Any:
    works = [work for work in [call() for call in calls] if work is not None]
    return _All(works) if works else None


class _All:
    """Several collectives as one: gloo's may end in any order."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *timeout: timedelta) -> bool:
        for work in self._works:
            work.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def has_all_gather_into_tensor() -> bool:
    return True


# ---- who is who -----------------------------------------------------------------------------------------


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank; 0 in a run of one process that has no group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks; 1 without a group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """LOCAL_RANK of the environment; 0 where it is not set."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> ProcessGroup | None:
    return dist.group.WORLD


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The rank in the world of a rank of `group`."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Ranks in the world of all members, in the group's order."""
    return list(range(get_world_size())) if group is None else dist.get_process_group_ranks(group)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """A DeviceMesh over all ranks, on the device of the run."""
    return init_device_mesh(join().device.type, mesh_shape, mesh_dim_names=mesh_dim_names)


def rank_alone() -> int:
    """In a group of this rank alone."""
    return 0


def size_alone() -> int:
    return 1


def no_group() -> Any:
    raise StateError("there are no sequence- or tensor-parallel groups: every rank is data parallel here")


# ---- start ----------------------------------------------------------------------------------------------

_MPI = {
    # launcher: its variables for rank, size and rank on the host
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    # SLURM_NTASKS is that of the job, also in its batch script, which is one process.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed, unless it runs already.

    Ranks come from the arguments, from the environment that torchrun and `zeroshard run` set, or, with
    `auto_mpi_discovery`, from an MPI launcher or srun, whose rank 0 must be named by MASTER_ADDR. A process that
    nobody launched is a run of one rank. `timeout` is by default DEEPSPEED_TIMEOUT minutes of the environment, or
    torch's. Raises CommError when the environment contradicts itself.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise CommError(
            "init_distributed(dist_init_required=False), but torch.distributed has no process group. Call "
            "torch.distributed.init_process_group first, or leave the argument out"
        )
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if timeout is None and minutes is not None:
        timeout = timedelta(minutes=float(minutes))
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if init_method is not None or rank >= 0:
        dist.init_process_group(
            dist_backend, init_method=init_method, rank=rank, world_size=world_size, **options
        )
        return
    if auto_mpi_discovery:
        _adopt_mpi(os.environ, distributed_port)
    if join(backend=dist_backend, timeout=timeout).group is None:
        logger.info("no launcher: a run of one rank")
        dist.init_process_group(dist_backend, store=HashStore(), rank=0, world_size=1, **options)


def _adopt_mpi(env: Any, port: int) -> None:
    """Give an MPI launcher's ranks the names that torch reads, where rank 0's address is known."""
    if "RANK" in env:
        return
    for rank, size, local in _MPI.values():
        if (
            int(env.get(size, "0") or 0) > 1
            and rank in env
            and ("MASTER_ADDR" in env or env.get(local) == env[rank])
        ):
            env.setdefault("MASTER_ADDR", "127.0.0.1")
            env.setdefault("MASTER_PORT", str(port))
            env.update(RANK=env[rank], WORLD_SIZE=env[size], LOCAL_RANK=env.get(local, "0"))
            return


# ---- the logger -----------------------------------------------------------------------------------------


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Log the collectives of engines made from now on, as the config's `comms_logger` says, or these arguments."""
    section = parse(deepspeed_config or {}).comms_logger
    given: dict[str, Any] = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
    }
    configure_log(
        **{name: getattr(section, name) if value is None else value for name, value in given.items()}
    )


def get_comm_operation_count() -> int:
    """Collectives logged so far."""
    return sum(logged_operations().values())


def get_logged_comm_ops() -> list[str]:
    """Their names."""
    return list(logged_operations())
