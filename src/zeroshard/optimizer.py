"""The user's optimizer, with its parameters exchanged for this rank's slices of the masters.

Any `torch.optim.Optimizer` that works element by element gives the same update on slices as on whole
parameters. The object, its groups (schedulers hold those dicts) and the rule *no gradient, no update* stay
PyTorch's; what is added is done in torch's own step hooks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.errors import ConfigError, ModelError
from zeroshard.gradients import ShardSlice

__all__ = [
    "ELEMENTWISE",
    "STATE_ELEMENTS",
    "build_optimizer",
    "check_parameters",
    "rewire",
    "state_bytes",
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
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Classes of torch.optim whose update of one element reads that element only."""

STATE_ELEMENTS: Mapping[str, float] = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adagrad": 1,
}
"""Optimizer state per parameter element, where it does not depend on options."""


def build_optimizer(name: str, options: Mapping[str, Any], parameters: Iterable[Any]) -> Optimizer:
    """The torch.optim class `name` over `parameters`; Adam-type ones with torch's fused kernels.

    Raises ConfigError when there is no such class, or for an option it does not take.
    """
    cls = getattr(torch.optim, name, None)
    if not (inspect.isclass(cls) and issubclass(cls, Optimizer)):
        raise ConfigError(f"optimizer.type {name!r} is neither a built-in name nor a class of torch.optim")
    accepted = inspect.signature(cls.__init__).parameters
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ConfigError(
            f"optimizer.params has {', '.join(map(repr, unknown))}, which torch.optim.{name} does not take; it "
            f"takes {', '.join(key for key in accepted if key not in ('self', 'params'))}"
        )
    options = dict(options)
    if cls in (torch.optim.Adam, torch.optim.AdamW) and not {"foreach", "capturable"} & set(options):
        options.setdefault("fused", True)
    optimizer: Optimizer = cls(parameters, **options)
    return optimizer


def check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Before anything is taken apart: the optimizer trains this model, or ModelError."""
    owned = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in owned:
                raise ModelError(
                    f"the optimizer's group {number} holds a parameter that the model does not (entry {place}, "
                    f"shape {tuple(parameter.shape)}). Build the optimizer from this model's parameters(), "
                    f"after any .to(), copy or wrapping that creates new ones."
                )


def needs_whole(optimizer: Optimizer, group: Mapping[str, Any]) -> bool | None:
    for base in type(optimizer).__mro__:
        if base.__name__ in ELEMENTWISE and base.__module__.startswith("torch.optim"):
            return False
    return True if type(optimizer).__name__ == "Adafactor" else None


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

    `slice_of` and `shape_of` are keyed by `id(parameter)`. State that exists already is cut along.
    """
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
            return flat.clone().view(part.shape)
        return value

    if not part.numel() and 0 not in shape:
        return {}  # another rank owns all of it, with state of whatever shape
    return {key: cut(value) for key, value in state.items()}


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of per-element state on this rank. Step counters (0-d tensors) are not counted."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
