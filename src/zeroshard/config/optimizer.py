"""What the `optimizer` section asks for, in torch's terms. torch itself is not needed to say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroshard.config.scalars import plain
from zeroshard.config.status import Status, refused
from zeroshard.config.tree import Optimizer
from zeroshard.errors import ConfigError

__all__ = ["OptimizerChoice", "class_name", "parameters_of", "torch_optimizer", "unsupported"]

_COMMON = ("lr", "weight_decay")
_ADAM = (
    *_COMMON,
    "adam_w_mode",
    "amsgrad",
    "betas",
    "bias_correction",
    "eps",
    "fp32_optimizer_states",
    "set_grad_none",
    "torch_adam",
)
_PARAMETERS: dict[str, tuple[str, ...] | None] = {
    "Adadelta": None,
    "Adafactor": _COMMON,
    "Adagrad": (*_COMMON, "fp32_optimizer_states"),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": None,
    "ASGD": None,
    "Lamb": (*_COMMON, "amsgrad", "betas", "bias_correction", "eps"),
    "Lion": (*_COMMON, "betas", "fp32_optimizer_states", "set_grad_none"),
    "Muon": _COMMON,
    "NAdam": None,
    "RAdam": None,
    "RMSprop": None,
    "Rprop": None,
    "SGD": _COMMON,
}
"""Optimizers in torch's spelling, and which of the parameters that many have each takes, besides its own rows
in the key table. None: not listed here, torch's class decides."""

_SPELLING = {name.lower(): name for name in _PARAMETERS}

_UNSUPPORTED: dict[str, Status] = {
    "lbfgs": refused("it re-evaluates the loss inside a step and keeps one state for all parameters"),
    "sparseadam": refused("it wants sparse gradients; gradients live in flat dense buffers"),
    **dict.fromkeys(
        ("onebitadam", "zerooneadam", "onebitlamb"), refused("1-bit compression is out of scope")
    ),
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"),
        refused("the mup package is out of scope; pass the optimizer object to initialize"),
    ),
}

_NO_EFFECT = ("fp32_optimizer_states", "set_grad_none")
_DEEPSPEED_ADAM = ("torch_adam", "adam_w_mode", "bias_correction")


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice:
    """A class of `zeroshard.optimizers` or `torch.optim`, by name, and its keyword arguments."""

    name: str
    kwargs: dict[str, Any]


def class_name(type_: str) -> str:
    """The spelling of an optimizer's class; a name unknown here is returned as it is."""
    return _SPELLING.get(type_.lower(), type_)


def parameters_of(type_: str) -> frozenset[str] | None:
    """Which of the parameters that many optimizers have `type_` takes; None: its class decides."""
    listed = _PARAMETERS.get(class_name(type_))
    return None if listed is None else frozenset(listed)


def unsupported(type_: str) -> Status | None:
    """Why an optimizer cannot be used in this release, or None."""
    return _UNSUPPORTED.get(type_.lower())


def torch_optimizer(section: Optimizer) -> OptimizerChoice | None:
    """The optimizer to build; None when the config names none.

    DeepSpeed's rules: type `Adam` means AdamW unless `adam_w_mode` is false; `AdamW` is always AdamW; the
    weight decay of both is 0 by default, and torch's own default with `torch_adam`.

    Raises:
        ConfigError: the type is one that `require_supported` refuses.
    """
    if section.type is None:
        return None
    reason = unsupported(section.type)
    if reason is not None:
        raise ConfigError(f"optimizer.type = {section.type}: {reason}; choose another optimizer")
    name = class_name(section.type)
    kwargs: dict[str, Any] = {
        # torch wants betas as a tuple; everything else may be a list.
        key: value if isinstance(value, tuple) else plain(value)
        for key, value in section.params.items()
        if key not in _NO_EFFECT
    }
    if name in ("Adam", "AdamW"):
        return _adam(name, kwargs)
    if name == "Lamb":
        # True is refused; false asks for nothing.
        kwargs.pop("amsgrad", None)
    return OptimizerChoice(name=name, kwargs=kwargs)


def _adam(name: str, kwargs: dict[str, Any]) -> OptimizerChoice:
    decoupled = bool(
        name == "AdamW" or kwargs.get("adam_w_mode", True) or kwargs.get("decoupled_weight_decay", False)
    )
    corrected = kwargs.get("bias_correction", True)
    if not kwargs.get("torch_adam", False):
        kwargs.setdefault("weight_decay", 0.0)
    if decoupled or not corrected:
        kwargs.pop("decoupled_weight_decay", None)
    for key in _DEEPSPEED_ADAM:
        kwargs.pop(key, None)
    if corrected:
        return OptimizerChoice(name="AdamW" if decoupled else "Adam", kwargs=kwargs)
    kwargs.pop("amsgrad", None)
    # What torch's own class decays by default; ours does not know which of the two it stands for.
    kwargs.setdefault("weight_decay", 0.01 if decoupled else 0.0)
    return OptimizerChoice(name="AdamWithoutBiasCorrection", kwargs={**kwargs, "decoupled": decoupled})
