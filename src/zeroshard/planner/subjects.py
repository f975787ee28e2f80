"""The model that a figure is wanted for: a factory, a Hugging Face config, or two numbers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.errors import ModelError
from zeroshard.wording import in_one_line

__all__ = ["factory_of", "layers_of"]

_MOST_LAYERS = 10_000


def factory_of(spec: str) -> Callable[[], nn.Module]:
    """What builds the model of `spec`: `module:function`, a `config.json` of Hugging Face, or its directory.

    Modules are also looked for in the current directory. Raises ModelError when there is no such thing; what is
    returned raises ModelError when the model cannot be built.
    """
    path = Path(spec)
    if path.exists():
        return _named(spec, _hugging_face(path))
    module, colon, name = spec.partition(":")
    if not (colon and module and name):
        raise ModelError(
            f"{spec!r} is no file or directory, and no factory either: give module:function, a directory with "
            f"the config.json of a Hugging Face model, or --params and --largest-layer"
        )
    return _named(spec, _imported(module, name))


def _named(spec: str, build: Callable[[], Any]) -> Callable[[], nn.Module]:
    def checked() -> nn.Module:
        try:
            model = build()
        except (Exception, SystemExit) as error:  # whatever the code of others raises
            raise ModelError(f"{spec}: the model cannot be built: {in_one_line(error)}") from error
        if not isinstance(model, nn.Module):
            raise ModelError(f"{spec}: it gave {type(model).__name__}, not a torch.nn.Module")
        return model

    return checked


def _imported(module: str, name: str) -> Callable[[], Any]:
    sys.path.insert(0, "")  # as `python -m` has it
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{module}:{name}: importing {module!r} raised {in_one_line(error)}") from error
    finally:
        sys.path.remove("")
    build = getattr(found, name, None)
    if not callable(build):
        has = "nothing of that name" if build is None else f"a {type(build).__name__}, which cannot be called"
        raise ModelError(f"{module}:{name}: the module has {has}; give a function without arguments")
    return build  # type: ignore[no-any-return]


def _hugging_face(path: Path) -> Callable[[], Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{path}: there is no config.json in it")
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{path}: reading the config of a Hugging Face model takes transformers: pip install 'zeroshard[hf]'"
        ) from error

    def build() -> Any:
        config = transformers.AutoConfig.from_pretrained(file)
        for name in config.architectures or ():
            cls = getattr(transformers, name, None)
            if cls is not None:
                return cls(config)
        return transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]

    return build


class _Layer(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(elements))


def layers_of(parameters: int, largest: int) -> Callable[[], nn.Module]:
    """A stand-in for a model of which two numbers are known: layers of `largest` elements, and one with the rest.

    Raises ModelError when the numbers do not fit, or give more than 10,000 layers.
    """
    if not 1 <= largest <= parameters:
        raise ModelError(
            f"--largest-layer is {largest} and --params {parameters}: a layer has at least 1 parameter and at most "
            f"all of them"
        )
    if parameters // largest > _MOST_LAYERS:
        raise ModelError(
            f"--params {parameters} in layers of {largest} would be {parameters // largest} layers, and "
            f"{_MOST_LAYERS} is the most; give the size of the largest layer"
        )
    rest = parameters % largest
    sizes = [largest] * (parameters // largest) + ([rest] if rest else [])
    return lambda: nn.ModuleList(_Layer(size) for size in sizes)
