"""Which dtype everything has: parameters, inputs, module buffers; and what the config asks of each.

    fp16, bf16        floating-point parameters and the inputs of the forward are cast; masters are fp32
    torch_autocast    the forward runs under `torch.autocast`; parameters of modules that it computes in 16 bit
                      anyway (`lower_precision_safe_modules`) are held and sent in 16 bit, all others in fp32
    kept modules      stay fp32 inside a 16-bit model: their parameters, buffers and inputs are fp32, and what
                      they return is cast back
    buffers           keep the dtype they have unless `data_types.buffer_dtype` says otherwise
    batch norms       have fp32 weights where their statistics, which are buffers, are fp32: torch's kernels take
                      16-bit inputs with these, or all of it in 16 bit

A kept module is one that `data_types.keep_in_fp32_modules` names: a part of its dotted name, or "auto", which
is what the model itself asks for (`_keep_in_fp32_modules` of Hugging Face models).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zeroshard.config import Config
from zeroshard.errors import ConfigError
from zeroshard.precision import DTYPES

__all__ = ["Precision"]

SAFE_MODULES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one run."""

    compute: torch.dtype | None = None
    """Of parameters and inputs; None leaves each as it is."""
    autocast: torch.dtype | None = None
    """The dtype of `torch.autocast` around the forward; None is off."""
    safe_modules: frozenset[type[nn.Module]] = frozenset()
    """Under autocast: classes whose parameters are held in the autocast dtype."""
    buffers: torch.dtype | None = None
    keep: tuple[str, ...] = ()
    """Name parts of modules that stay fp32."""

    @staticmethod
    def of(config: Config) -> Precision:
        """What the config's precision sections ask for. ConfigError for a class that cannot be imported."""
        cast = config.torch_autocast
        return Precision(
            compute=None if config.compute_dtype == "fp32" else DTYPES[config.compute_dtype],
            autocast=DTYPES[cast.dtype or "bf16"] if cast.enabled else None,
            safe_modules=_classes(cast.lower_precision_safe_modules or SAFE_MODULES),
            buffers=None
            if config.data_types.buffer_dtype is None
            else DTYPES[config.data_types.buffer_dtype],
            keep=config.data_types.keep_in_fp32_modules,
        )

    @property
    def needs_loss_scale(self) -> bool:
        """Gradients are made in fp16, whose smallest numbers vanish."""
        return torch.float16 in (self.compute, self.autocast)

    def parameter_dtypes(self, model: nn.Module) -> dict[str, torch.dtype]:
        """By name, in the order of definition, what each parameter is held in while the model computes."""
        wide = {id(p) for name in self.kept_modules(model) for p in model.get_submodule(name).parameters()}
        wide |= {id(p) for m in model.modules() if self._has_fp32_statistics(m) for p in m.parameters()}
        unsafe = {
            id(parameter)
            for module in model.modules()
            if type(module) not in self.safe_modules
            for parameter in module.parameters(recurse=False)
        }

        def dtype_for(parameter: nn.Parameter) -> torch.dtype:
            if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
                return parameter.dtype  # packed weights
            if id(parameter) in wide:
                return torch.promote_types(parameter.dtype, torch.float32)
            if self.autocast is not None:
                return parameter.dtype if id(parameter) in unsafe else self.autocast
            return self.compute or parameter.dtype

        return {name: dtype_for(parameter) for name, parameter in model.named_parameters()}

    def _has_fp32_statistics(self, module: nn.Module) -> bool:
        """It is a batch norm, or an instance norm, that computes with running averages in fp32."""
        if not isinstance(module, _NormBase) or module.running_mean is None:
            return False
        return (self.buffers or module.running_mean.dtype) is torch.float32

    def check_kept(self, model: nn.Module) -> None:
        """ConfigError where `data_types.keep_in_fp32_modules` names what is not there, or one of two modules that
        share a parameter."""
        key, paths = "data_types.keep_in_fp32_modules", [name for name, _ in model.named_modules() if name]
        for part in self.keep:
            if part != "auto" and not any(_names(part, path) for path in paths):
                raise ConfigError(
                    f"{key} names {part!r}, and no module of {type(model).__name__} has that in its dotted name; "
                    f"write one of the names of model.named_modules(), or a part of it between dots"
                )
        kept = self.kept_modules(model)
        inside = {id(p): name for name in kept for p in model.get_submodule(name).parameters()}
        for path, module in model.named_modules():
            if any(path == outer or path.startswith(f"{outer}.") for outer in kept):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in inside:
                    raise ConfigError(
                        f"{key} keeps {inside[id(parameter)]!r} in fp32, and {path or 'the model itself'} has the "
                        f"same parameter as {name!r} and would compute in {self.compute} with it; name both, or "
                        f"neither"
                    )

    def kept_modules(self, model: nn.Module) -> list[str]:
        """Dotted names of the modules that stay fp32; of nested ones the outermost."""
        if self.compute is None:
            return []
        parts = set(_kept_parts(self.keep, model))
        kept: list[str] = []
        for name, _ in model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in kept)
            if name and not inside and any(_names(part, name) for part in parts):
                kept.append(name)
        return kept

    def kept_calls(self, model: nn.Module) -> list[str]:
        """Dotted names of the modules that are called to compute in fp32. A list of modules has no forward: its
        entries stand for it."""

        def called(path: str, module: nn.Module) -> Iterator[str]:
            if type(module).forward is not nn.Module.forward:
                yield path
                return
            for name, child in module.named_children():
                yield from called(f"{path}.{name}", child)

        return [call for path in self.kept_modules(model) for call in called(path, model.get_submodule(path))]

    def cast_buffers(self, model: nn.Module) -> None:
        """Give floating-point module buffers the dtype the config asks for; kept modules' become fp32."""
        kept = set(self.kept_modules(model))
        for path, module in model.named_modules():
            inside = any(path == outer or path.startswith(f"{outer}.") for outer in kept)
            dtype = torch.float32 if inside and self.buffers is not None else self.buffers
            for name, buffer in module._buffers.items():
                if buffer is not None and dtype is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)


def _names(part: str, path: str) -> bool:
    """`part` is one component of the dotted `path`, or several in a row: `wo` is in `layers.0.wo`."""
    return f".{part}." in f".{path}."


def _kept_parts(keep: Iterable[str], model: nn.Module) -> Iterator[str]:
    for part in keep:
        if part != "auto":
            yield part
            continue
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            yield from getattr(model, attribute, None) or ()


def _classes(names: Iterable[str]) -> frozenset[type[nn.Module]]:
    return frozenset(_class(name) for name in names)


def _class(name: str) -> type[nn.Module]:
    module, _, leaf = name.rpartition(".")
    key = "torch_autocast.lower_precision_safe_modules"
    try:
        found: Any = getattr(importlib.import_module(module), leaf)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key} names {name!r}, which cannot be imported ({error}); write the dotted name of a module class, "
            f"such as torch.nn.Linear"
        ) from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"{key} names {name!r}, which is no torch.nn.Module class; remove it")
    return found
