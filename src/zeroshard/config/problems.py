"""What is wrong with a config, collected first and raised once.

Every check adds `Finding`s; `raise_findings` turns them into one error that lists them all, so that a user
repairs a file in one go. pydantic's own errors are translated here and never reach the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from zeroshard.errors import ConfigError, UnknownKeyError

__all__ = ["Finding", "Problem", "findings_of", "raise_findings", "shown"]


class Problem(ValueError):
    """Raised by a validator of one value: the rule that the value breaks, and the cure."""

    def __init__(self, rule: str, cure: str) -> None:
        super().__init__(f"{rule}; {cure}")
        self.rule = rule
        self.cure = cure


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a config."""

    path: str
    """Dotted name of the key, as the user wrote it."""
    value: Any
    rule: str
    cure: str
    unknown: bool = False
    """The key itself does not exist (the error is then an `UnknownKeyError`)."""

    def __str__(self) -> str:
        given = "" if self.unknown else f" = {shown(self.value)}"
        return f"{self.path}{given}: {self.rule}; {self.cure}"


def shown(value: Any) -> str:
    """`value` as it would stand in JSON, on one line of at most 80 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = json.dumps(dict(value), default=str) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


_RULES: dict[str, tuple[str, str]] = {
    "model_type": ("must be an object of keys", 'write {"key": value, ...}, or remove it'),
    "model_attributes_type": ("must be an object of keys", 'write {"key": value, ...}, or remove it'),
    "string_type": ("must be a string", "put the value in quotes"),
    "tuple_type": ("must be a list", "write [value, ...]"),
    "missing": ("is required here", "add the key"),
}


def findings_of(error: ValidationError, suggest: Callable[[str], str]) -> list[Finding]:
    """pydantic's errors as findings. `suggest` gives the cure of an unknown key, from its dotted name."""
    findings = []
    for item in error.errors(include_url=False):
        path = _dotted(item["loc"])
        cause = item.get("ctx", {}).get("error")
        if item["type"] == "extra_forbidden":
            cure = suggest(path)
            finding = Finding(path=path, value=item["input"], rule="no such key", cure=cure, unknown=True)
        elif isinstance(cause, Problem):
            finding = Finding(path=path, value=item["input"], rule=cause.rule, cure=cause.cure)
        elif item["type"] == "literal_error":
            rule = f"must be one of {item['ctx']['expected']}"
            finding = Finding(path=path, value=item["input"], rule=rule, cure="write one of those")
        else:
            rule, cure = _RULES.get(item["type"], (item["msg"], "correct the value, or remove the key"))
            finding = Finding(path=path, value=item["input"], rule=rule, cure=cure)
        findings.append(finding)
    return findings


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def raise_findings(findings: Iterable[Finding], source: str) -> None:
    """Raise one error for all of `findings`; return if there are none.

    Raises:
        UnknownKeyError: if any of them is an unknown key (the other findings are listed too).
        ConfigError: otherwise.
    """
    listed = list(findings)
    if not listed:
        return
    kind = UnknownKeyError if any(finding.unknown for finding in listed) else ConfigError
    if len(listed) == 1:
        raise kind(f"{source}: {listed[0]}")
    lines = "".join(f"\n  {finding}" for finding in listed)
    raise kind(f"{source}: {len(listed)} problems{lines}")
