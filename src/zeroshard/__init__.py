"""zeroshard: ZeRO training for PyTorch, with the DeepSpeed config and calls.

    engine, optimizer, loader, scheduler = zeroshard.initialize(model=model, config="ds_config.json")

Importing this package imports nothing but its errors: torch and the rest come with the first name that is
used, so that the launcher starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zeroshard import errors

if TYPE_CHECKING:
    from zeroshard import checkpointing, zero
    from zeroshard.config import Config
    from zeroshard.construction import Init
    from zeroshard.data import RepeatingLoader
    from zeroshard.engine import Engine, StepResult
    from zeroshard.initialization import initialize
    from zeroshard.loading import load_pretrained
    from zeroshard.parameters import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
    )

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Engine",
    "Init",
    "RepeatingLoader",
    "StepResult",
    "ZeroParamStatus",
    "__version__",
    "checkpointing",
    "errors",
    "initialize",
    "load_pretrained",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "zero",
]

_HOME_OF = {
    "Config": ("zeroshard.config", "Config"),
    "Engine": ("zeroshard.engine", "Engine"),
    "Init": ("zeroshard.construction", "Init"),
    "RepeatingLoader": ("zeroshard.data", "RepeatingLoader"),
    "StepResult": ("zeroshard.engine", "StepResult"),
    "ZeroParamStatus": ("zeroshard.guard", "Status"),
    "initialize": ("zeroshard.initialization", "initialize"),
    "load_pretrained": ("zeroshard.loading", "load_pretrained"),
    **{name: ("zeroshard.parameters", name) for name in __all__ if name.startswith("safe_")},
}


def __getattr__(name: str) -> Any:
    if name in ("checkpointing", "zero"):
        return importlib.import_module(f"zeroshard.{name}")
    try:
        module, attribute = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'zeroshard' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
