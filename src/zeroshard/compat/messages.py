"""`deepspeed.utils.logging`: a logger named DeepSpeed that prints nothing until someone sets logging up."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

__all__ = [
    "log_dist",
    "log_dist_once",
    "logger",
    "print_rank_0",
    "set_log_level_from_string",
    "warning_once",
]

logger = logging.getLogger("DeepSpeed")
logger.setLevel(logging.INFO)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all without `ranks`, or when -1 is one of them."""
    if not ranks or -1 in ranks or _rank() in ranks:
        logger.log(level, f"[Rank {_rank()}] {message}")


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """The first time only."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def warning_once(message: str) -> None:
    """A warning, the first time only."""
    logger.warning(message)


def print_rank_0(message: Any, *_: Any, **__: Any) -> None:
    """On rank 0 only."""
    if _rank() == 0:
        print(message, flush=True)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """`debug`, `info`, `warning`, `error` or `critical`; ValueError for another word."""
    (custom_logger or logger).setLevel(log_level_str.upper())
