"""Which implementation of the seam carries a process group: decided here, once, by all ranks together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroshard.comm.local import LocalCollectives
from zeroshard.comm.seam import Collectives
from zeroshard.comm.torch_backend import TorchCollectives

__all__ = ["open_collectives"]


def open_collectives(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """Collectives of `group` for tensors on `device`; a call that all ranks of the group make together.

    `None` stands for the default group, or for a single rank when torch.distributed is not initialised.
    Raises `CommError` when this process is not in the group.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return LocalCollectives()
        group = dist.group.WORLD
        assert group is not None
    if dist.get_world_size(group) == 1:
        return LocalCollectives()
    return TorchCollectives(group)
