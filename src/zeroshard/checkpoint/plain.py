"""What a checkpoint holds that is no tensor: values that are read back without running code.

torch's weights-only unpickler builds tensors, numbers, text and lists, tuples and dicts of them. To these come
harmless classes of the standard library, members of enumerations, and what the user names with
`torch.serialization.add_safe_globals`. numpy's numbers become Python's and its arrays tensors when they are
saved: a file could describe arrays whose elements are addresses.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import functools
import io
import pathlib
import pickle
import struct
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.errors import CheckpointError

__all__ = ["check_known", "harmless", "pack", "unpack"]

_Allowed = Callable[..., Any] | tuple[Callable[..., Any], str]

_HARMLESS: list[_Allowed] = [
    *((pathlib.Path, f"pathlib{place}.PosixPath") for place in ("", "._local")),
    *((pathlib.PureWindowsPath, f"pathlib{place}.WindowsPath") for place in ("", "._local")),
    *((pathlib.PurePosixPath, f"pathlib{place}.PurePosixPath") for place in ("", "._local")),
    argparse.Namespace,
    types.SimpleNamespace,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    decimal.Decimal,
    uuid.UUID,
    *(dict, float, frozenset, int, list, range, set, slice, str, tuple),
]

_NAMES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_FORMATS = dict(zip(_NAMES, "?bhiqBHIQefd", strict=True))
"""What the struct module calls numpy's numbers."""


class _NumberType:
    """What a numpy dtype is in files that others wrote, such as DeepSpeed's: of a plain number, or an error."""

    def __init__(self, name: str, *_: Any) -> None:
        self._format, self._order = _FORMATS[name], "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = ">" if state[1] == ">" else "<"

    def read(self, data: bytes) -> Any:
        return struct.unpack(self._order + self._format, data)[0]


def _number(kind: _NumberType, data: bytes) -> Any:
    return _NumberType.read(kind, data)


_NUMPY: list[_Allowed] = [
    (_NumberType, "numpy.dtype"),
    *((_number, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


class Unknown:
    """A member of an enumeration that this process has not imported."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name


def pack(value: Any) -> bytes:
    """`value` as bytes; anything that pickle raises."""
    buffer = io.BytesIO()
    torch.save(tree_map(_without_numpy, value), buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What was packed, tensors on the CPU. Raises pickle.UnpicklingError for what may run code."""
    asked = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    unknown = [(functools.partial(Unknown, name), name) for name in asked if _found(name) is None]
    with harmless(asked, unknown):
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


@contextmanager
def harmless(asked: Iterable[str], more: Iterable[_Allowed] = ()) -> Iterator[None]:
    """Inside, torch's weights-only unpickler knows classes that run no code of anybody's when they are built, those
    of the names `asked` that are enumerations and imported, and `more`, which wins.

    A file can write into what it names. Members of enumerations are everybody's: should one have been changed, it
    is put back, and that is an UnpicklingError.
    """
    more = list(more)
    taken = {entry[1] for entry in more if isinstance(entry, tuple)}
    enumerations = [(found, n) for n in asked if n not in taken and _has_members(found := _found(n))]
    members = {id(member): member for found, _ in enumerations for member in _members(found)}
    before = {key: dict(vars(member)) for key, member in members.items()}
    try:
        with torch.serialization.safe_globals([*_HARMLESS, *_NUMPY, *enumerations, *more]):
            yield
    finally:
        changed = [member for key, member in members.items() if not _same(vars(member), before[key])]
        for member in changed:
            vars(member).clear()
            vars(member).update(before[id(member)])
    if changed:
        raise pickle.UnpicklingError(f"it changes {type(changed[0]).__qualname__}.{changed[0].name}")


def _has_members(found: Any) -> bool:
    """An enumeration; one without members makes new classes when it is called."""
    return isinstance(found, type) and issubclass(found, enum.Enum) and bool(found.__members__)


def _members(found: type[enum.Enum]) -> list[enum.Enum]:
    return [*found.__members__.values(), *found._value2member_map_.values()]


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[key] is before[key] for key in now)


def check_known(values: Mapping[str, Any], where: str) -> None:
    """CheckpointError when there is something that could not be built, since its class is not here."""
    for key, value in values.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Unknown):
                raise CheckpointError(
                    f"{where}: entry {key!r} of client_state has a {leaf.name}, which this process has not "
                    f"imported. Import the module that defines it before loading; nothing is imported because a "
                    f"file says so."
                )


def _without_numpy(leaf: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.generic):
        return leaf.item()
    if numpy is not None and isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biufc":
        return torch.tensor(leaf)
    return leaf


def _found(name: str) -> Any:
    """What is imported under the name in a pickle, None when nothing is."""
    module, _, attribute = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, outer = module.rpartition(".")
        attribute = f"{outer}.{attribute}"
    return _at(sys.modules[module], attribute) if module else None


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
