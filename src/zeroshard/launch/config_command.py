"""`zeroshard config`: what a file's keys do here, or every key there is."""

from __future__ import annotations

import sys
from pathlib import Path

from zeroshard import config
from zeroshard.console import show_table

__all__ = ["explain_file", "list_keys"]


def list_keys() -> None:
    """Print every config key: name, type, default, what uses it, meaning."""
    show_table(("key", "type", "default", "tier", "here", "meaning"), config.render_keys())


def explain_file(file: Path) -> None:
    """Print what happens with each key of `file`, then raise if this release cannot do it.

    Raises:
        ConfigError: the file cannot be read, breaks a rule, or asks for what is not there.
    """
    parsed = config.parse(file)
    rows = ((given.path, str(given.value), given.status) for given in config.explain_config(parsed))
    show_table(("key", "value", "here"), rows)
    for note in parsed.notes:
        print(f"zeroshard: {note}", file=sys.stderr)
    config.require_supported(parsed)
