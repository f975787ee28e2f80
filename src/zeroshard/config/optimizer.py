"""What the `optimizer` section asks for, in torch's terms. torch itself is not needed to say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroshard.config.scalars import plain
from zeroshard.config.status import Status, not_yet, refused
from zeroshard.config.tree import Optimizer
from zeroshard.errors import ConfigError

__all__ = ["OptimizerChoice", "torch_name", "torch_optimizer", "unsupported"]

_ELEMENTWISE = {
    name.lower(): name
    for name in (
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
}

_UNSUPPORTED: dict[str, Status] = {
    "lion": not_yet("Lion"),
    "lamb": not_yet("Lamb: it needs norms of whole parameters, and a shard has a slice of each"),
    "adafactor": not_yet("Adafactor: it needs whole rows and columns, and a shard has a slice of each"),
    "muon": not_yet("Muon: it needs whole matrices, and a shard has a slice of each"),
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

_DEEPSPEED_ONLY = ("torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states", "set_grad_none")


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice:
    """A class of `torch.optim`, by name, and its keyword arguments."""

    name: str
    kwargs: dict[str, Any]


def torch_name(type_: str) -> str:
    """The spelling of an optimizer in `torch.optim`; a name unknown here is returned as it is."""
    return _ELEMENTWISE.get(type_.lower(), type_)


def unsupported(type_: str) -> Status | None:
    """Why an optimizer cannot be used in this release, or None."""
    return _UNSUPPORTED.get(type_.lower())


def torch_optimizer(section: Optimizer) -> OptimizerChoice | None:
    """The optimizer to build; None when the config names none.

    DeepSpeed's rules: type `Adam` means AdamW unless `adam_w_mode` is false; `AdamW` is always AdamW; the
    weight decay of both is 0 by default, and torch's own default with `torch_adam`.

    Raises:
        ConfigError: `bias_correction` is false, or the type is one that `require_supported` refuses.
    """
    if section.type is None:
        return None
    reason = unsupported(section.type)
    if reason is not None:
        raise ConfigError(f"optimizer.type = {section.type}: {reason}; choose another optimizer")
    name = torch_name(section.type)
    kwargs: dict[str, Any] = {
        # torch wants betas as a tuple; everything else may be a list.
        key: value if isinstance(value, tuple) else plain(value)
        for key, value in section.params.items()
    }
    if name not in ("Adam", "AdamW"):
        return OptimizerChoice(name=name, kwargs=kwargs)
    if kwargs.get("bias_correction", True) is not True:
        raise ConfigError("optimizer.params.bias_correction = false: not in this release; remove it")
    decoupled = (
        name == "AdamW" or kwargs.get("adam_w_mode", True) or kwargs.get("decoupled_weight_decay", False)
    )
    if not kwargs.get("torch_adam", False):
        kwargs.setdefault("weight_decay", 0.0)
    if decoupled:
        kwargs.pop("decoupled_weight_decay", None)
    for key in _DEEPSPEED_ONLY:
        kwargs.pop(key, None)
    return OptimizerChoice(name="AdamW" if decoupled else "Adam", kwargs=kwargs)
