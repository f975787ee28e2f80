"""What is measured: operations, sizes, dtypes. Read from the command line; every mistake is a ConfigError."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from zeroshard import precision
from zeroshard.comm.bandwidth import OPERATIONS
from zeroshard.errors import ConfigError

__all__ = ["DTYPES", "Plan", "dtypes_of", "operations_of", "sizes_of"]

DTYPES = {
    **precision.DTYPES,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_LARGEST = 1 << 60
"""Beyond it torch has no number for the bytes of a tensor."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows are measured in the order: operation, dtype, size, and who carries it."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of the longest tensor."""
    dtypes: tuple[str, ...]
    iterations: int | None
    """None: as many as fit into `seconds`."""
    warmup: int
    seconds: float = 0.2
    """For one row, without the warm-up."""


def sizes_of(text: str) -> tuple[int, ...]:
    """Bytes, from `4K,1M,16M`; K, M and G are powers of 1024."""

    def size(word: str) -> int:
        found = re.fullmatch(r"([0-9]{1,19})([KMG]?)(i?B)?", word, re.IGNORECASE)
        number = int(found.group(1)) * _UNITS[found.group(2).upper()] if found else 0
        if not 1 <= number <= _LARGEST:
            raise ConfigError(f"--sizes: {word!r} is not a number of bytes; write 4096, 4K, 16M or 1G")
        return number

    return _distinct("--sizes", [size(word) for word in _words(text)])


def operations_of(text: str) -> tuple[str, ...]:
    """Names of `bandwidth.OPERATIONS`; hyphens are fine."""
    return _known("--ops", [word.replace("-", "_") for word in _words(text)], OPERATIONS)


def dtypes_of(text: str) -> tuple[str, ...]:
    """Names of `DTYPES`."""
    return _known("--dtypes", _words(text), tuple(DTYPES))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _known(option: str, words: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    for word in words:
        if word not in known:
            raise ConfigError(f"{option}: {word!r} is not one of {', '.join(known)}")
    return _distinct(option, words)


def _distinct(option: str, values: Sequence[_T]) -> tuple[_T, ...]:
    if not values:
        raise ConfigError(f"{option}: nothing is given; give one value or several with commas")
    return tuple(dict.fromkeys(values))
