"""Modules `deepspeed.*`, made from the table of names when they are imported.

A module's names are looked up when they are used, so that importing costs nothing. A name that the table does not
have, of a part of DeepSpeed that zeroshard does not have, is a class that can be imported, subclassed and asked for
with `isinstance`, and says where to go when it is called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from zeroshard.compat.names import ABSENT, ABSENT_NAMES, COMMANDS, MODULES
from zeroshard.errors import NotYetError

__all__ = ["fill", "resolve"]

ROOT = "deepspeed"


def resolve(home: str) -> Any:
    """What `module:attribute` names; `module` alone is the module."""
    path, _, attribute = home.partition(":")
    module = importlib.import_module(path)
    return getattr(module, attribute) if attribute else module


def fill(name: str, namespace: dict[str, Any]) -> None:
    """Give a module of this name its lazy names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    homes = MODULES.get(name, {})

    def get(attribute: str) -> Any:
        if attribute in homes:
            value = resolve(homes[attribute])
        elif _exists(f"{name}.{attribute}"):
            value = importlib.import_module(f"{name}.{attribute}")
        elif (reason := reason_for(f"{name}.{attribute}")) and not attribute.startswith("__"):
            value = absent(name, attribute, reason)
        else:
            near = get_close_matches(attribute, homes, n=1)
            raise AttributeError(
                f"module {name!r} of zeroshard's stand-in for deepspeed has no attribute {attribute!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        namespace[attribute] = value
        return value

    namespace["__getattr__"] = get
    namespace["__dir__"] = lambda: sorted({*homes, *_children(name)})
    namespace["__all__"] = sorted(homes)


def reason_for(path: str) -> str | None:
    """Why zeroshard does not have what DeepSpeed has at `path`, where to go; None when nothing is known of it."""
    if path in ABSENT_NAMES:
        return ABSENT_NAMES[path]
    while path:
        if path in ABSENT:
            return ABSENT[path]
        path = path.rpartition(".")[0]
    return None


class _Absent(type):
    """Of a class that stands for something that is not there, as its attributes and methods do."""

    path: str
    reason: str

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(cls.path, name, cls.reason)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotYetError(f"{cls.path} is not in zeroshard: {cls.reason}")


def absent(module: str, name: str, reason: str) -> type:
    """A class that stands for `name` of `module`."""
    about = {"__module__": module, "__doc__": f"Not there: {reason}"}
    return _Absent(name, (), {**about, "path": f"{module}.{name}", "reason": reason})


def _exists(name: str) -> bool:
    return name in MODULES or name in ABSENT or bool(_children(name))


def _children(name: str) -> set[str]:
    prefix = f"{name}."
    return {path[len(prefix) :].split(".")[0] for path in (*MODULES, *ABSENT) if path.startswith(prefix)}


class _Finder(MetaPathFinder, Loader):
    """Finds every `deepspeed.*` that the tables know of, also inside a part that is absent as a whole."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{ROOT}.") or not (_exists(name) or reason_for(name)):
            return None
        return ModuleSpec(name, self, origin="zeroshard.compat.names", is_package=name not in COMMANDS)

    def exec_module(self, module: ModuleType) -> None:
        fill(module.__name__, module.__dict__)

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m deepspeed.checkpoint.ds_to_universal` and its like."""
        command = COMMANDS.get(name)
        if command is None:
            return None
        call = f"import sys; from zeroshard.compat.modules import resolve; sys.exit(resolve({command!r})())"
        return compile(call, f"<{name}>", "exec")
