"""The types of single values, stricter than pydantic's: "3" and true are not numbers, 5e8 is an integer.

Each type is a plain Python type with one validator in front that raises `Problem`, so that every message
has a rule and a cure.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from zeroshard.config.problems import Problem

__all__ = [
    "Bool",
    "DType",
    "Float",
    "FloatOrAuto",
    "FrozenMapping",
    "Int",
    "IntOrAuto",
    "NonNegativeFloat",
    "NonNegativeInt",
    "Params",
    "Period",
    "PositiveFloat",
    "PositiveInt",
    "Ratio",
    "Stage",
    "Strings",
    "boolean",
    "integer",
    "plain",
    "real",
]


class FrozenMapping(Mapping[str, Any]):
    """A read-only dict, frozen all the way down: what an open section (`optimizer.params`) holds."""

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = {str(key): _frozen(value) for key, value in (items or {}).items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def plain(value: Any) -> Any:
    """A copy of nested mappings and sequences made of plain dicts and lists; other objects are not copied."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _number(value: Any) -> int | float:
    if isinstance(value, str):
        raise Problem("must be a number, not a string", "remove the quotes")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise Problem("must be a number", "write a number, or remove the key to get the default")
    number = int(value) if isinstance(value, numbers.Integral) else float(value)
    if not math.isfinite(number):
        raise Problem("must be a finite number", "write a finite number, or remove the key")
    return number


def _bounded(number: int | float, low: float | None, high: float | None, *, above: bool = False) -> None:
    if low is not None and (number < low or (above and number == low)):
        least = f"more than {low}" if above else f"at least {low}"
        raise Problem(f"must be {least}", f"raise it to {least}, or remove the key to get the default")
    if high is not None and number > high:
        raise Problem(f"must be at most {high}", f"lower it to at most {high}, or remove the key")


def integer(low: int | None = None) -> Callable[[Any], int]:
    """A check: the value as an int (5e8 is one), or `Problem`. `low` is allowed."""

    def validate(value: Any) -> int:
        number = _number(value)
        if number != int(number):
            raise Problem("must be a whole number", f"write {round(number)}")
        _bounded(number, low, None)
        return int(number)

    return validate


def real(
    low: float | None = None, high: float | None = None, *, above: bool = False
) -> Callable[[Any], float]:
    """A check: the value as a finite float, or `Problem`. Bounds are allowed values; `low` not with `above`."""

    def validate(value: Any) -> float:
        number = _number(value)
        _bounded(number, low, high, above=above)
        return float(number)

    return validate


def boolean(value: Any) -> bool:
    """The value if it is true or false, or `Problem`."""
    if not isinstance(value, bool):
        raise Problem("must be true or false", "write true or false, without quotes")
    return value


def _stage(value: Any) -> int:
    if isinstance(value, (bool, str)) or value not in (0, 1, 2, 3):
        cure = "write 0 (off), 1 (optimizer state), 2 (and gradients) or 3 (and parameters)"
        raise Problem("the ZeRO stage must be 0, 1, 2 or 3", cure)
    return int(value)


def _period(value: Any) -> int | None:
    # Accelerate silences progress lines with Python's infinity.
    if value is None or value == math.inf:
        return None
    return integer(1)(value)


def _integer_or_auto(value: Any) -> int | str:
    return "auto" if value == "auto" else integer(1)(value)


def _real_or_auto(value: Any) -> float | str:
    return "auto" if value == "auto" else real()(value)


def _strings(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(item, str) for item in listed):
        raise Problem("must be a string or a list of strings", 'write ["name", ...]')
    return tuple(dict.fromkeys(listed))


def _mapping(value: Any) -> FrozenMapping:
    if not isinstance(value, Mapping):
        raise Problem("must be an object of keys", 'write {"key": value, ...}, or remove it')
    return FrozenMapping(value)


def _dtype(value: Any) -> Any:
    # A dict from Python may hold a torch.dtype; its str() is a spelling. torch is not imported for that.
    return _DTYPE_SPELLINGS.get(str(value).lower(), value)


_DTYPE_SPELLINGS = {
    prefix + name: dtype
    for prefix in ("", "torch.")
    for dtype, names in {
        "fp32": ("fp32", "float32", "float"),
        "fp16": ("fp16", "float16", "half"),
        "bf16": ("bf16", "bfloat16"),
    }.items()
    for name in names
}

Int = Annotated[int, BeforeValidator(integer())]
NonNegativeInt = Annotated[int, BeforeValidator(integer(0))]
PositiveInt = Annotated[int, BeforeValidator(integer(1))]
Float = Annotated[float, BeforeValidator(real())]
NonNegativeFloat = Annotated[float, BeforeValidator(real(0))]
PositiveFloat = Annotated[float, BeforeValidator(real(0, above=True))]
IntOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_integer_or_auto)]
FloatOrAuto = Annotated[float | Literal["auto"], BeforeValidator(_real_or_auto)]
Ratio = Annotated[float, BeforeValidator(real(0, 1))]
Bool = Annotated[bool, BeforeValidator(boolean)]
Stage = Annotated[int, BeforeValidator(_stage)]
Period = Annotated[int | None, BeforeValidator(_period)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_strings)]
Params = Annotated[FrozenMapping, BeforeValidator(_mapping), PlainSerializer(plain)]
DType = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_dtype)]
