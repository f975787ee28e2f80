"""Ranks stay together: an error on one of them is an error on all of them, and names the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zeroshard.errors import CheckpointError
from zeroshard.states import States

__all__ = ["together", "told"]

T = TypeVar("T")


def together(states: States, what: str, action: Callable[[], T]) -> T:
    """`action()`, which is no collective; when it raises on one rank, all ranks raise."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    if states.sum([float(problem is not None)])[0]:
        texts: list[Any] = [None] * states.world
        if states.world > 1:
            dist.all_gather_object(texts, None if problem is None else f"{problem}")
        if problem is not None:
            raise problem
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        raise CheckpointError(f"{what}: rank {rank} could not go on: {text}")
    return result  # type: ignore[return-value]


def told(failures: CheckpointException, what: str) -> BaseException:
    """One error with every rank's reason."""
    reasons: dict[str, list[int]] = {}
    for rank, (error, _) in sorted(failures.failures.items()):
        if isinstance(error, KeyboardInterrupt):
            return error
        text = (
            f"{error.strerror}: {error.filename}"
            if isinstance(error, OSError) and error.strerror
            else str(error)
        )
        reasons.setdefault(text, []).append(rank)
    told = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in reasons.items())
    return CheckpointError(f"{what}. {told}. Nothing of it is left; what `latest` names is as before.")
