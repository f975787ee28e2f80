"""The user's optimizer, with its parameters exchanged for this rank's slices of the masters.

Any `torch.optim.Optimizer` that works element by element gives the same update on slices as on whole
parameters. The object, its groups (schedulers hold those dicts) and the rule *no gradient, no update* stay
PyTorch's; what is added is done in torch's own step hooks.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard import optimizers
from zeroshard.errors import ConfigError, ModelError, StateError
from zeroshard.gradients import ShardSlice

__all__ = [
    "COUNTERS",
    "ELEMENTWISE",
    "build_optimizer",
    "can_fuse",
    "check_parameters",
    "is_outermost_step",
    "needs_whole",
    "rewire",
    "state_bytes",
    "state_elements",
    "uncut_parameters",
]

log = logging.getLogger("zeroshard")

ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "AdamWithoutBiasCorrection",
        "Adamax",
        "Lion",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Classes of torch.optim and zeroshard.optimizers whose update of one element reads that element only."""

WHOLE = frozenset({"Adafactor", "Muon"})
"""Classes of torch.optim whose update reads whole rows, columns or matrices."""

_STATE_ELEMENTS: Mapping[str, int] = {
    "Adam": 2,
    "AdamW": 2,
    "AdamWithoutBiasCorrection": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adagrad": 1,
    "Lamb": 2,
    "Lion": 1,
}
"""Optimizer state per parameter element, where it does not depend on options."""


def build_optimizer(
    name: str, options: Mapping[str, Any], parameters: Iterable[Any], name_of: Mapping[int, str]
) -> Optimizer:
    """The optimizer `name`, of zeroshard.optimizers or else of torch.optim, over `parameters`.

    torch's fused kernels are the default where every supported torch has them on every device. Muon also takes
    `muon_lr` and `adam_lr`, and its groups are made by `muon_groups`.

    Args:
        parameters: parameters, or group dicts.
        name_of: the parameters' names, by `id(parameter)`.

    Raises ConfigError when there is no such class, or for an option or a value it does not take.
    """
    cls = _class_of(name)
    accepted = [key for key in inspect.signature(cls.__init__).parameters if key not in ("self", "params")]
    if cls is optimizers.Muon:
        accepted += ["muon_lr", "adam_lr"]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ConfigError(
            f"optimizer.params has {', '.join(map(repr, unknown))}, which {name} does not take; it takes "
            f"{', '.join(accepted)}"
        )
    options, parameters = dict(options), list(parameters)
    if cls is optimizers.Muon:
        rates = {key: options.pop(key, None) for key in ("muon_lr", "adam_lr")}
        parameters = optimizers.muon_groups(parameters, name_of, lr=options.get("lr"), **rates)
    if can_fuse(cls, options, parameters):
        options.setdefault("fused", True)
    try:
        optimizer: Optimizer = cls(parameters, **options)
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ConfigError(f"optimizer.type {name} cannot be built with {options}: {error}") from error
    return optimizer


def _class_of(name: str) -> type[Optimizer]:
    known = {
        key: cls
        for module, names in ((torch.optim, dir(torch.optim)), (optimizers, optimizers.__all__))
        for key in names
        if inspect.isclass(cls := getattr(module, key))
        and issubclass(cls, Optimizer)
        and cls is not Optimizer
    }
    if name in known:
        return known[name]
    usable = sorted(ELEMENTWISE | WHOLE | {"Lamb"})
    # DeepSpeed's classes are no types, and have a type's name in theirs: FusedAdam, DeepSpeedCPULion.
    inside = [key for key in usable if key.lower() in name.lower()]
    near = inside or difflib.get_close_matches(name, usable, n=1)
    cure = f"did you mean {max(near, key=len)}?" if near else f"known are {', '.join(usable)}"
    raise ConfigError(
        f"optimizer.type {name!r} is neither a built-in name nor a class of torch.optim (case matters); {cure}"
    )


def can_fuse(cls: type[Optimizer], options: Mapping[str, Any], parameters: list[Any]) -> bool:
    """Whether torch's fused kernel can be the default. Adagrad's runs on the CPU alone before torch 2.12."""
    if {"foreach", "capturable"} & set(options) or options.get("differentiable"):
        return False
    if cls is torch.optim.SGD:
        # The kernel wants the momentum of all parameters to begin at the same step.
        groups = [group for group in parameters if isinstance(group, dict)]
        return not options.get("momentum") and not any(group.get("momentum") for group in groups)
    return cls in (torch.optim.Adam, torch.optim.AdamW)


def needs_whole(optimizer: Optimizer, group: Mapping[str, Any]) -> bool | None:
    """Whether the update of an element of `group` reads other elements of its parameter; None is not known.

    A class can say it itself by a static method `needs_whole(group)`, as those of zeroshard.optimizers do. A
    subclass of a class of torch.optim is taken to be like it.
    """
    told = getattr(type(optimizer), "needs_whole", None)
    if told is not None:
        return bool(told(group))
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in ELEMENTWISE | WHOLE:
            return base.__name__ in WHOLE
    return None


def check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Before anything is taken apart: the optimizer trains this model, each parameter once, or ModelError."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    group_of: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            key = id(parameter)
            if key not in name_of:
                raise ModelError(
                    f"the optimizer's group {number} holds a parameter that the model does not (entry {place}, "
                    f"shape {tuple(parameter.shape)}). Build the optimizer from this model's parameters(), "
                    f"after any .to(), copy or wrapping that creates new ones."
                )
            if key in group_of:
                first = group_of[key]
                where = (
                    f"twice in its group {number}"
                    if first == number
                    else f"in its groups {first} and {number}"
                )
                raise ModelError(
                    f"the optimizer holds parameter {name_of[key]!r} {where}, and would update it twice per "
                    f"step. Give each parameter once."
                )
            group_of[key] = number


def uncut_parameters(optimizer: Optimizer | None, shards: int, allow_untested: bool) -> set[int]:
    """Ids of the parameters that one rank must own whole: those of groups whose maths needs whole parameters.

    Raises ModelError for an optimizer that is not known to be right on slices, unless `allow_untested`: then
    every parameter of it is kept whole, so that it is right if it looks at one parameter at a time. With one
    shard nothing is cut, and every optimizer is right.
    """
    if optimizer is None or shards == 1:
        return set()
    name = type(optimizer).__name__
    uncut: set[int] = set()
    for group in optimizer.param_groups:
        whole = needs_whole(optimizer, group)
        if whole is None and not allow_untested:
            raise ModelError(
                f"optimizer {name} is not known to work element by element, and its parameters would be cut "
                f"into flat slices. Known: {', '.join(sorted(ELEMENTWISE))}; Adafactor, Lamb and Muon, which get "
                f"whole parameters; and subclasses of these. If {name} looks at one parameter at a time, set "
                f'"zero_allow_untested_optimizer": true, and each parameter is kept whole on one rank.'
            )
        if whole is not False:
            uncut |= {id(parameter) for parameter in group["params"]}
    if uncut and needs_whole(optimizer, optimizer.param_groups[0]) is None:
        log.warning(
            "optimizer %s is untested: each parameter is kept whole on one rank. What it computes from several "
            "parameters together (a global norm, a line search) would differ between ranks.",
            name,
        )
    return uncut


def rewire(
    optimizer: Optimizer, slice_of: Mapping[int, ShardSlice], shape_of: Mapping[int, tuple[int, ...]]
) -> None:
    """Exchange each parameter for its slice, in place: same groups, same order, same number of entries.

    `slice_of` and `shape_of` are keyed by `id(parameter)`. State of whole parameters is cut along: what exists
    already, and what `load_state_dict` brings later.
    """
    whole = {id(part): tuple(shape_of[key]) for key, part in slice_of.items()}
    optimizer.register_state_dict_post_hook(_mark_ranges)
    optimizer.register_load_state_dict_pre_hook(functools.partial(_cut_loaded, whole))
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in state:
                part = slice_of[id(parameter)]
                optimizer.state[part] = _cut_state(state[parameter], shape_of[id(parameter)], part)
        group["params"] = [slice_of[id(parameter)] for parameter in group["params"]]


def _cut_state(state: Mapping[str, Any], shape: tuple[int, ...], part: ShardSlice) -> dict[str, Any]:
    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and tuple(value.shape) == shape:
            flat = value.reshape(-1)[part.start : part.start + part.numel()]
            # State that was made with the optimizer has the device and dtype that the model had then.
            dtype = part.dtype if value.is_floating_point() else value.dtype
            return flat.to(device=part.device, dtype=dtype, copy=True).view(part.shape)
        return value.to(part.device) if isinstance(value, Tensor) and value.dim() else value

    if not part.numel() and 0 not in shape:
        return {}  # another rank owns all of it, with state of whatever shape
    return {key: cut(value) for key, value in state.items()}


_RANGES = "zeroshard_ranges"
"""Of a state dict: which elements of each flattened parameter its state is of, so that it finds its rank again."""


def _ranges_of(optimizer: Optimizer) -> list[tuple[int, int]]:
    parts = [part for group in optimizer.param_groups for part in group["params"]]
    starts = [getattr(part, "start", 0) for part in parts]
    return [(start, start + part.numel()) for start, part in zip(starts, parts, strict=True)]


def _mark_ranges(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict[_RANGES] = _ranges_of(optimizer)


def _check_ranges(shape_of: Mapping[int, tuple[int, ...]], optimizer: Optimizer, saved: Any) -> None:
    """StateError for state of parts that are not this rank's, which may have the same sizes, or be missing."""
    parts = [part for group in optimizer.param_groups for part in group["params"]]
    whole = [(0, math.prod(shape_of.get(id(part), part.shape))) for part in parts]
    if saved is None or [tuple(pair) for pair in saved] in (_ranges_of(optimizer), whole):
        return
    raise StateError(
        "optimizer.load_state_dict: the state is that of another rank's parts, or of another number of ranks. What "
        "`optimizer.state_dict()` gives is this rank's alone: save with engine.save_checkpoint, on all ranks, and "
        "load with engine.load_checkpoint"
    )


def _cut_loaded(
    shape_of: Mapping[int, tuple[int, ...]], optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """`state_dict` for the slices that `optimizer` has; `shape_of` are their parameters' shapes, by `id(slice)`.

    State of slices that are this rank's stays. Raises StateError for that of others, which fits nothing here.
    """
    _check_ranges(shape_of, optimizer, state_dict.get(_RANGES))
    states = dict(state_dict["state"])
    for group, saved in zip(
        optimizer.param_groups, state_dict["param_groups"], strict=False
    ):  # torch compares
        for part, key in zip(group["params"], saved["params"], strict=False):
            shape = shape_of.get(id(part), tuple(part.shape))
            if key not in states or tuple(part.shape) == shape:
                continue
            states[key] = cut = _cut_state(states[key], shape, part)
            for name, value in cut.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != part.shape:
                    raise StateError(
                        f"optimizer.load_state_dict: state {name!r} of parameter {key} has shape "
                        f"{tuple(value.shape)}; the parameter has {shape}, and this rank {part.numel()} of its "
                        f"elements. It is another rank's part, or of another number of ranks: load what "
                        f"engine.save_checkpoint wrote, with engine.load_checkpoint"
                    )
    return {**state_dict, "state": states}


COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep once per parameter, as 0-d tensors. The moments of a 0-d parameter have as few
dimensions, so the name has to tell which is which."""


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of per-element state on this rank. Step counters and other numbers per parameter are not counted."""
    return sum(
        value.nbytes
        for part, state in optimizer.state.items()
        for name, value in state.items()
        if isinstance(value, Tensor) and (value.dim() or not (part.dim() or name in COUNTERS))
    )


def state_elements(optimizer: Optimizer | None) -> int | None:
    """Of per-element state, for each element of a parameter; None is not known. A subclass is taken to be like its
    base."""
    names = [base.__name__ for base in type(optimizer).__mro__]
    return next((_STATE_ELEMENTS[name] for name in names if name in _STATE_ELEMENTS), None)


def is_outermost_step(optimizer: Optimizer) -> bool:
    """Asked by a step hook: the `step` it runs around is not called by another one, as by `super().step()`.

    torch runs an optimizer's hooks around each `step` in the line of classes of which an instance was ever made.
    The frames tell, and not a count, which a step that raises would leave wrong.
    """
    step = sys._getframe(2)  # torch's wrapper, which called the hook
    frame = step.f_back
    while frame is not None:
        if frame.f_code is step.f_code and frame.f_locals.get("self") is optimizer:
            return False
        frame = frame.f_back
    return True
