"""Sharded parameters in other people's code, under the names of `deepspeed.zero` and its leaf functions.

    with zeroshard.zero.GatheredParameters(layer.weight, modifier_rank=0):   # all ranks enter
        if rank == 0:
            layer.weight.zero_()                                             # kept on all ranks

A *leaf* is a module that is gathered, freed and reduced as one unit with all it contains, so that ranks may run
different parts of it (experts). It is chosen before `initialize`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.construction import Init
from zeroshard.errors import ModelError, ShardedAccessError
from zeroshard.guard import LEAF_MARK, has_engine, home_of
from zeroshard.tiled_linear import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "get_z3_leaf_modules",
    "register_external_parameter",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


class GatheredParameters:
    """Full weights inside a `with` block, of parameters of any engines, or of none yet.

    Args:
        params: a parameter, several (any iterable, also a generator), or a module.
        modifier_rank: whose edits are kept, on all ranks, in the fp32 masters too. Without it an edit raises
            when the block ends.
        fwd_module: accepted and not needed: using a parameter of another module needs no registration.
        enabled: False makes the block do nothing.

    Every rank enters and leaves. Blocks may be nested and overlap: weights stay until the outermost one ends,
    and what an inner block keeps is no edit of the outer one. Parameters that no engine holds have their full
    weights anyway; their edits are sent from `modifier_rank` when a process group exists.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params = _listed(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._stack = ExitStack()

    def __enter__(self) -> None:
        engines: dict[int, tuple[Any, list[Tensor]]] = {}
        for parameter in self._params:
            home = home_of(parameter)
            if home is not None:
                access = home.access
                engines.setdefault(id(access), (access, []))[1].append(parameter)
        for access, held in engines.values():
            self._stack.enter_context(access.gathered(held, self._modifier_rank))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        plain = [parameter for parameter in self._params if home_of(parameter) is None]
        if self._modifier_rank is not None and plain and dist.is_available() and dist.is_initialized():
            for parameter in plain:
                with torch.no_grad():
                    dist.broadcast(parameter.data, self._modifier_rank)
        return self._stack.__exit__(kind, error, trace)


def _listed(params: Any) -> list[Tensor]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Tensor):
        return [params]
    try:
        found = list(params)
    except TypeError:
        raise _not_parameters(params) from None
    for entry in found:
        if not isinstance(entry, Tensor):
            raise _not_parameters(entry)
    return list(dict.fromkeys(found))


def _not_parameters(given: Any) -> ShardedAccessError:
    return ShardedAccessError(
        f"GatheredParameters got {given!r} ({type(given).__name__}); it takes a parameter, an iterable of "
        f"parameters, or a module. Of named_parameters() pass the second halves."
    )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a weight that is used outside its own module is gathered when it is touched."""
    _check_parameter(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do either."""
    _check_parameter(parameter)


def _check_parameter(parameter: Any) -> None:
    if not isinstance(parameter, nn.Parameter):
        raise ShardedAccessError(
            f"an external parameter is a torch.nn.Parameter; got {type(parameter).__name__}. Pass the weight itself"
        )


# ---- leaves ---------------------------------------------------------------------------------------------


def set_z3_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make every module of these classes a leaf; the modules found.

    A class is given itself, or by its name, short or with its module. Call it before `initialize`. Raises
    ModelError when there is none, unless `raise_if_not_found` is false.
    """
    return _mark(model, classes_or_names, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo it, also for classes that `zero_optimization.leaf_module` names."""
    return _mark(model, classes_or_names, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules of these dotted names leaves; (those found, names that no module has)."""
    return _mark_paths(model, list(names), str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same for all modules whose dotted name ends so."""
    return _mark_paths(model, list(suffixes), str.endswith, flag, raise_if_not_found)


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Make one module a leaf, or no longer."""
    for parameter in module.parameters():
        if has_engine(parameter):
            raise ModelError(
                f"{type(module).__name__} belongs to an engine already, whose units are fixed. Choose leaves "
                f"before `initialize`"
            )
    setattr(module, LEAF_MARK, flag)


def z3_leaf_module(module: nn.Module) -> bool:
    """`module` was made a leaf by one of these functions."""
    return bool(getattr(module, LEAF_MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of `model` that were."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _mark(
    model: nn.Module, classes_or_names: Iterable[type[nn.Module] | str], flag: bool, strict: bool
) -> list[nn.Module]:
    wanted = list(classes_or_names)
    for entry in wanted:
        if not isinstance(entry, (str, type)):
            raise ModelError(f"a leaf is named by a class or by its name; got {entry!r}")
    found = [module for module in model.modules() if any(_is_of(module, entry) for entry in wanted)]
    if strict and not found:
        names = ", ".join(entry if isinstance(entry, str) else entry.__name__ for entry in wanted)
        present = sorted({type(module).__name__ for module in model.modules()})
        raise ModelError(f"no module of {type(model).__name__} is a {names}; it has {', '.join(present)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: nn.Module, entry: type[nn.Module] | str) -> bool:
    cls = type(module)
    return entry in (cls, cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def _mark_paths(
    model: nn.Module, wanted: list[str], matches: Any, flag: bool, strict: bool
) -> tuple[list[nn.Module], list[str]]:
    paths = dict(model.named_modules())
    missing = [name for name in wanted if not any(matches(path, name) for path in paths)]
    if strict and missing:
        raise ModelError(f"no module of {type(model).__name__} is named {', '.join(map(repr, missing))}")
    found = [module for path, module in paths.items() if any(matches(path, name) for name in wanted)]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing
