"""From what the user hands over (a dict, a path, a text) to one plain dict, and nothing more.

Text is JSON plus what people write in DeepSpeed configs: `//`, `#` and `/* */` comments and trailing
commas. Both are blanked out in place before the JSON parser sees them, so line and column stay true.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from zeroshard.config.problems import shown
from zeroshard.config.scalars import plain
from zeroshard.errors import ConfigError

__all__ = ["RawConfig", "read_config"]

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_TOKEN = re.compile(rf"(?P<string>{_STRING})(?P<key>\s*:)?|[{{}}\[\]]")


@dataclass(frozen=True, kw_only=True)
class RawConfig:
    """A config as it was read."""

    data: dict[str, Any]
    source: str
    """`file PATH`, `dict`, `text` or `base64 text`; messages begin with it."""


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | RawConfig) -> RawConfig:
    """Read a dict, a path, a JSON text, or the urlsafe base64 of a JSON text; what has been read stays.

    A string with `{` or `[` in front, or of several lines, is a text. Any other string is a path; one that
    does not exist is tried as base64.

    Raises:
        ConfigError: the file is missing, empty, a directory or unreadable; the text is not JSON, has a key
            twice, or its top level is not an object. The message names the source, the line and the cure.
    """
    if isinstance(config, RawConfig):
        return config
    if isinstance(config, Mapping):
        _require_names(config, "")
        return RawConfig(data=plain(config), source="dict")
    if isinstance(config, str) and (config.lstrip()[:1] in ("", "{", "[") or "\n" in config):
        return RawConfig(data=_parse(config, "text"), source="text")
    if isinstance(config, (str, os.PathLike)):
        path = Path(os.fspath(config))
        decoded = None if isinstance(config, os.PathLike) or os.path.exists(config) else _base64(config)
        if decoded is not None:
            return RawConfig(data=_parse(decoded, "base64 text"), source="base64 text")
        source = f"file {path}"
        return RawConfig(data=_parse(_read(path, source), source), source=source)
    raise ConfigError(
        f"config: {type(config).__name__} given; a config is a dict, the path of a JSON file or a JSON text; "
        "pass config= one of those"
    )


def _require_names(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                place = f" in {where}" if where else ""
                raise ConfigError(f"dict: key {name!r}{place}: must be a string; put it in quotes")
            _require_names(item, f"{where}.{name}" if where else name)


def _base64(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _read(path: Path, source: str) -> str:
    try:
        # Editors on some systems put a byte-order mark in front.
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        where = f"the working directory is {Path.cwd()}" if not path.is_absolute() else "the path is absolute"
        raise ConfigError(
            f"{source}: no such file ({where}), nor is it a JSON text; correct the path, or pass a dict"
        ) from None
    except IsADirectoryError:
        found = sorted(item.name for item in path.glob("*.json"))
        cure = f"name a file in it ({', '.join(found[:5])})" if found else "name a JSON file"
        raise ConfigError(f"{source}: a directory; a config is a file; {cure}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: not UTF-8 at byte {error.start}; a config is a text file; save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: cannot be read ({error}); make it readable, or pass a dict") from None


def _parse(text: str, source: str) -> dict[str, Any]:
    if not text.strip():
        raise ConfigError(f"{source}: empty; a config is a JSON object; write at least {{}}")
    bare = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))
    try:
        data = json.loads(bare, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(_not_json(error, text, source)) from None
    except _NotFinite as error:
        raise ConfigError(f"{source}: {error} is not JSON; write a number, or null") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply; a config has at most five levels") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source}: the top level is {shown(data)}; it must be an object; "
            'write {"zero_optimization": {"stage": 1}, ...}'
        )
    twice = _duplicate_keys(bare)
    if twice:
        lines = "".join(f"\n  {path}: on lines {first} and {second}" for path, first, second in twice)
        raise ConfigError(f"{source}: a key may stand only once in an object; remove one of each pair{lines}")
    return data


def _blank(match: re.Match[str]) -> str:
    found = match.group()
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)


class _NotFinite(ValueError):
    """NaN or an infinity stands in a text."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NotFinite(name)


def _not_json(error: json.JSONDecodeError, text: str, source: str) -> str:
    lines = text.splitlines()
    line = lines[error.lineno - 1] if error.lineno <= len(lines) else ""
    # A long line is cut so that the place stays in view.
    start = max(0, error.colno - 60)
    margin = f"  {error.lineno} | "
    return (
        f"{source}: not JSON at line {error.lineno}, column {error.colno}: {error.msg}; correct that line\n"
        f"{margin}{line[start : start + 100]}\n{' ' * (len(margin) + error.colno - 1 - start)}^"
    )


def _duplicate_keys(text: str) -> list[tuple[str, int, int]]:
    """`(dotted name, first line, second line)` of each key that stands twice. `text` is valid JSON."""
    twice: list[tuple[str, int, int]] = []
    # One entry per open bracket: the lines of its keys, and the key that is being filled.
    open_keys: list[dict[str, int]] = []
    names: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["key"]:
            name = json.loads(token["string"])
            line = text.count("\n", 0, token.start()) + 1
            names[-1] = name
            if name in open_keys[-1]:
                twice.append((".".join(part for part in names if part), open_keys[-1][name], line))
            open_keys[-1][name] = line
        elif token.group() in ("{", "["):
            open_keys.append({})
            names.append("")
        elif token.group() in ("}", "]"):
            open_keys.pop()
            names.pop()
    return twice
