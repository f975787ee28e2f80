"""`zeroshard config`: what a file's keys do here, or every key there is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard import config
from zeroshard.config.aliases import canonical_path
from zeroshard.console import show_table

__all__ = ["explain_file", "list_keys"]


def list_keys() -> None:
    """Print every config key: name, type, default, what uses it, meaning."""
    show_table(("key", "type", "default", "tier", "here", "meaning"), config.render_keys())


def explain_file(file: Path) -> None:
    """Print what happens with each key of `file`, then raise if this release cannot do it.

    An "auto" stays one: whoever fills it in, a trainer or `initialize`, is not there.

    Raises:
        ConfigError: the file cannot be read, breaks a rule, or asks for what is not there.
    """
    read = config.read_config(file)
    known = config.resolve_auto(read.data, config.AutoFacts(), source=read.source, strict=False)
    parsed = config.parse(replace(read, data=known))
    rows = {given.path: (str(given.value), given.status) for given in config.explain_config(parsed)}
    for path in _autos(read.data):
        rows[path] = ("auto", "filled in by the trainer, or from the model and the optimizer")
    show_table(("key", "value", "here"), ((path, *cells) for path, cells in rows.items()))
    for note in parsed.notes:
        print(f"zeroshard: {note}", file=sys.stderr)
    config.require_supported(parsed)


def _autos(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        path = canonical_path(prefix + name)
        if value == "auto":
            yield path
        elif isinstance(value, Mapping):
            yield from _autos(value, f"{path}.")
