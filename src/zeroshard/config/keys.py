"""The key table: every key of the config, and what this release does with it.

No key is ignored in silence. A key is `used` by what its row names, has `no effect` for a stated reason (one
note when it is given), is `not yet` there or `refused` (an error when it asks for something), or is another
spelling of one of those. Types and defaults are not repeated here: they are the tree's.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from zeroshard.config.core_keys import CORE_KEYS
from zeroshard.config.later_keys import LATER_KEYS
from zeroshard.config.optimizer import unsupported
from zeroshard.config.optimizer_keys import OPTIMIZER_KEYS
from zeroshard.config.scalars import FrozenMapping
from zeroshard.config.section import Section
from zeroshard.config.status import Key
from zeroshard.config.tree import Config
from zeroshard.config.zero_keys import ZERO_KEYS

__all__ = [
    "BY_PATH",
    "SECTIONS",
    "TABLE",
    "GivenKey",
    "KeyRow",
    "asks",
    "explain_config",
    "given_keys",
    "iter_keys",
    "parameter_keys",
    "render_keys",
    "switch_of",
    "tree_fields",
    "value_at",
]

TABLE: tuple[Key, ...] = (*CORE_KEYS, *OPTIMIZER_KEYS, *ZERO_KEYS, *LATER_KEYS)
BY_PATH: dict[str, Key] = {key.path: key for key in TABLE}
SECTIONS: frozenset[str] = frozenset(
    ".".join(parts[:length])
    for parts in (path.split(".") for path in BY_PATH if "(" not in path and "[]" not in path)
    for length in range(1, len(parts))
)
"""Dotted names of the keys that hold keys."""

_OFFLOAD = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")
_SWITCHES: dict[str, tuple[str, ...]] = {
    **{f"{path}.": (f"{path}.device",) for path in _OFFLOAD},
    **{f"{path}.": (path,) for path in ("zero_optimization.zenflow", "zero_optimization.zeropp_loco_param")},
    "aio.": tuple(f"{path}.device" for path in _OFFLOAD),
    "checkpoint.writer.": ("checkpoint.writer",),
    "compile.": ("compile.deepcompile",),
    "optimizer.": ("optimizer.type",),
    "scheduler.": ("scheduler.type",),
    "tensor_parallel.": ("tensor_parallel.autotp_size", "tensor_parallel.tensor_parallel.tp_size"),
    **{f"{path[: -len('enabled')]}": (path,) for path in BY_PATH if path.endswith(".enabled")},
}
"""Section -> the keys that switch it on. While none of them asks, the rest of the section does nothing."""


@dataclass(frozen=True, kw_only=True)
class KeyRow:
    """A row of the table, as text, for a listing."""

    path: str
    type: str
    default: Any
    tier: Literal["A", "B", "C"]
    status: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class GivenKey:
    """A key that a config gives, and what happens with it."""

    path: str
    value: Any
    default: Any
    status: str
    key: Key | None
    """None for a parameter of an optimizer or schedule that the table has no row for: it is passed on."""


def iter_keys() -> Iterator[KeyRow]:
    """Every key, in the order of the table, with the type and default of the tree."""
    fields = tree_fields()
    for key in TABLE:
        field = fields.get(key.status.text if key.status.kind in ("alias", "deprecated") else key.path)
        yield KeyRow(
            path=key.path,
            type=key.type or (_type_name(field.annotation) if field is not None else "object"),
            default=_default(field) if field is not None else key.default,
            tier=key.tier,
            status=str(key.status),
            meaning=key.meaning,
        )


def render_keys() -> tuple[tuple[str, str, str, str, str, str], ...]:
    """`iter_keys` as cells of text: path, type, default, tier, status, meaning."""
    return tuple(
        (
            row.path,
            row.type,
            "-" if row.default is None else str(row.default),
            row.tier,
            row.status,
            row.meaning,
        )
        for row in iter_keys()
    )


def explain_config(config: Config) -> tuple[GivenKey, ...]:
    """One row per key that `config` gives, in canonical spelling; old names are in `config.notes`."""
    return tuple(given_keys(config))


@cache
def tree_fields() -> Mapping[str, FieldInfo]:
    """Dotted name -> field, for every key of the tree.

    A section is not a key itself, except one that is off while absent: its presence is the switch. Keys of
    the objects in a list are below `name[]`.
    """
    return dict(_fields(Config, ""))


def _fields(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        path = prefix + name
        inner = _section_in(field.annotation)
        if inner is None or inner is not field.annotation:
            yield path, field
        if inner is not None:
            listed = get_origin(field.annotation) is tuple
            yield from _fields(inner, f"{path}[]." if listed else f"{path}.")


def _section_in(annotation: Any) -> type[Section] | None:
    # Python 3.10 takes list[int] for a class; it has an origin.
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _type_name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return "|".join(_type_name(part) for part in parts if part is not type(None))
    if origin is tuple:
        return f"list[{_type_name(parts[0])}]"
    if parts:
        return _type_name(parts[0])
    if annotation is FrozenMapping or _section_in(annotation) is not None:
        return "object"
    return {type(None): "null", Any: "any"}.get(annotation) or str(annotation.__name__)


def asks(key: Key, value: Any, default: Any) -> bool:
    """Whether `value` asks for something: it is not the default, nor otherwise neutral."""
    if value == default or value in key.neutral:
        return False
    # An open section that is empty or switched off asks for nothing.
    return not (isinstance(value, FrozenMapping) and (not value or value.get("enabled") is False))


def given_keys(config: Config) -> Iterator[GivenKey]:
    """Every key that was given, with its row and status."""
    for path, value, field in _set_fields(config, ""):
        key = BY_PATH[path]
        if path in ("optimizer.params", "scheduler.params"):
            yield from _given_parameters(config, path, value)
        else:
            status = _status_now(config, key, value)
            yield GivenKey(path=path, value=value, default=_default(field), status=status, key=key)


def _set_fields(section: Section, prefix: str) -> Iterator[tuple[str, Any, FieldInfo]]:
    for name, field in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if prefix + name in tree_fields():
            yield prefix + name, value, field
        if isinstance(value, Section):
            yield from _set_fields(value, f"{prefix}{name}.")


def _given_parameters(config: Config, path: str, params: Mapping[str, Any]) -> Iterator[GivenKey]:
    section = path.partition(".")[0]
    type_ = getattr(config, section).type
    rows = parameter_keys(section, type_)
    for name, value in params.items():
        key = rows.get(name, rows.get("*"))
        yield GivenKey(
            path=f"{path}.{name}",
            value=value,
            default=None if key is None else key.default,
            status="used: passed on" if key is None else _status_now(config, key, value),
            key=key,
        )


def parameter_keys(section: str, type_: str | None) -> dict[str, Key]:
    """Name -> row, of the parameters that an optimizer or a schedule of type `type_` is known to have."""
    found: dict[str, Key] = {}
    start = f"{section}.params"
    for key in TABLE:
        if not key.path.startswith(start) or key.path == start:
            continue
        qualifier, name = key.path[len(start) :].rsplit(".", 1)
        patterns = qualifier.strip(" ()").lower().split("|") if qualifier else ["*"]
        if any(fnmatchcase((type_ or "").lower(), pattern) for pattern in patterns):
            found[name] = key
    return found


def switch_of(config: Config, path: str) -> tuple[bool, tuple[Key, ...]]:
    """Whether the section that `path` is in is switched on, and by which keys it would be (not: itself)."""
    prefixes = [prefix for prefix in _SWITCHES if path.startswith(prefix)]
    switches = tuple(s for prefix in prefixes for s in _SWITCHES[prefix] if s != path)
    if not switches or any(path in _SWITCHES[prefix] for prefix in prefixes):
        return True, ()
    keys = tuple(BY_PATH[switch] for switch in switches)
    return any(asks(key, value_at(config, key.path), _default(tree_fields()[key.path])) for key in keys), keys


def value_at(config: Config, path: str) -> Any:
    """The value of the key with this dotted name; None inside of a section that is not there."""
    inner: Any = config
    for part in path.split("."):
        inner = getattr(inner, part, None)
    return inner


def _status_now(config: Config, key: Key, value: Any) -> str:
    on, switches = switch_of(config, key.path)
    if not on:
        return f"off, because {' and '.join(switch.path for switch in switches)} is off"
    if key.path == "optimizer.type" and value is not None:
        return str(unsupported(value) or key.status)
    return str(key.status)
