"""Every accepted spelling of a key, turned into the one spelling that the tree has.

Which spellings there are is in the key table (status `alias` or `deprecated`); how an old value becomes a
new one is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroshard.config.keys import BY_PATH, SECTIONS, TABLE, tree_fields
from zeroshard.config.problems import Finding, shown
from zeroshard.config.scalars import FrozenMapping, plain

__all__ = ["Canonical", "canonical", "canonical_path"]

_LOSS_SCALE = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
_OFFLOAD = ("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param")
_DROPPED = {
    "zero_optimization.cpu_offload_use_pin_memory": "write pin_memory inside offload_optimizer",
    "aio.thread_count": "write intra_op_parallelism",
}
_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Canonical:
    """A config in canonical spelling."""

    data: dict[str, Any]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]


def canonical_path(path: str) -> str:
    """The dotted name that the tree has for `path`; unknown names come back unchanged.

    >>> canonical_path("bfloat16.enabled")
    'bf16.enabled'
    """
    head, dot, rest = path.partition(".")
    section = BY_PATH.get(head)
    if section is not None and section.status.kind == "deprecated":
        path = section.status.text + dot + rest
    key = BY_PATH.get(path)
    return key.status.text if key is not None and key.status.kind in ("alias", "deprecated") else path


def canonical(raw: dict[str, Any]) -> Canonical:
    """Convert aliases, deprecated keys and absent (null) sections. `raw` is left alone."""
    data: dict[str, Any] = plain(raw)
    notes: list[str] = []
    findings: list[Finding] = []
    _boolean_stage(data, notes)
    _drop_null_sections(data, "")
    for key in TABLE:
        if key.status.kind in ("alias", "deprecated") and key.path not in _DROPPED:
            _move(data, key.path, key.status.text, key.status.kind == "deprecated", notes, findings)
    for path, cure in _DROPPED.items():
        if _take(data, path) is not _ABSENT:
            notes.append(f"{path} is dropped, as DeepSpeed does; {cure}")
    _loss_scale_in_bf16(data, notes)
    return Canonical(data=data, notes=tuple(notes), findings=tuple(findings))


def _boolean_stage(data: dict[str, Any], notes: list[str]) -> None:
    given = data.get("zero_optimization")
    if not isinstance(given, bool):
        return
    # The form of DeepSpeed 0.1, when there was one stage and its one knob stood at the top level.
    size = data.pop("allgather_size", None)
    section: dict[str, Any] = {"stage": int(given)}
    if given and size is not None:
        section["allgather_bucket_size"] = size
    data["zero_optimization"] = section
    notes.append(f"zero_optimization = {shown(given)} is an old form of {shown(section)}")


def _drop_null_sections(data: dict[str, Any], prefix: str) -> None:
    for name in list(data):
        path = canonical_path(prefix + name)
        if data[name] is None and (path in SECTIONS or _is_open(path)):
            del data[name]
        elif isinstance(data[name], dict):
            _drop_null_sections(data[name], f"{path}.")


def _is_open(path: str) -> bool:
    field = tree_fields().get(path)
    return field is not None and field.annotation is FrozenMapping


def _move(
    data: dict[str, Any], old: str, new: str, note: bool, notes: list[str], findings: list[Finding]
) -> None:
    value = _take(data, old)
    if value is _ABSENT:
        return
    if old in _OFFLOAD and isinstance(value, bool):
        value = {"device": "cpu"} if value else _ABSENT
    if note:
        notes.append(f"{old} is an old name of {new}; write {new}")
    if value is _ABSENT:
        return
    present = _peek(data, new)
    if present is not _ABSENT:
        rule = f"stands beside {new} = {shown(present)}, which is the same key"
        findings.append(Finding(path=old, value=value, rule=rule, cure=f"remove {old}"))
        return
    *parents, leaf = new.split(".")
    inner = data
    for part in parents:
        inner = inner.setdefault(part, {})
    inner[leaf] = value


def _parent(data: dict[str, Any], path: str) -> tuple[dict[str, Any] | None, str]:
    *parents, leaf = path.split(".")
    inner: Any = data
    for part in parents:
        inner = inner.get(part) if isinstance(inner, dict) else None
    return (inner if isinstance(inner, dict) else None), leaf


def _peek(data: dict[str, Any], path: str) -> Any:
    inner, leaf = _parent(data, path)
    return _ABSENT if inner is None else inner.get(leaf, _ABSENT)


def _take(data: dict[str, Any], path: str) -> Any:
    inner, leaf = _parent(data, path)
    return _ABSENT if inner is None else inner.pop(leaf, _ABSENT)


def _loss_scale_in_bf16(data: dict[str, Any], notes: list[str]) -> None:
    section = data.get("bf16")
    if not isinstance(section, dict):
        return
    # People switch fp16 to bf16 by renaming the section; bf16 has the range of fp32 and needs no scale.
    found = [name for name in _LOSS_SCALE if section.pop(name, _ABSENT) is not _ABSENT]
    if found:
        notes.append(f"bf16.{{{', '.join(found)}}}: no effect, bf16 needs no loss scale; remove them")
