"""torch.compile and the engine: `engine.compile`, and what of a model is compiled.

Weights come and go between compiled graphs: where a unit's forward begins and ends, dynamo breaks the graph. So a
graph sees whole weights of the same class and shape in every step, and is compiled once.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zeroshard.errors import NotYetError
from zeroshard.hooks import is_compiled

__all__ = ["Compiling", "compiled_units"]


class Compiling:
    """A base of `Engine`."""

    module: nn.Module

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **kwargs: Any,
    ) -> None:
        """Compile the module in place, as `module.compile(backend=backend, **compile_kwargs)` does.

        Raises NotYetError for `schedule` and `compiled_autograd_enabled`.
        """
        if schedule is not None:
            raise NotYetError(
                "engine.compile(schedule=...) is for the passes of DeepCompile: not yet; leave it out"
            )
        if compiled_autograd_enabled:
            raise NotYetError(
                "engine.compile(compiled_autograd_enabled=True): not yet; it would trace the hooks that gather "
                "weights and collect gradients. Leave it out: backward is compiled with forward"
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}), **kwargs)

    @property
    def is_compiled(self) -> bool:
        """The module as a whole is compiled."""
        return is_compiled(self.module)


def compiled_units(model: nn.Module) -> list[str]:
    """Dotted names of the modules that are compiled, "" for the whole model; of nested ones the outermost."""
    if is_compiled(model):
        return [""]
    found = []
    for name, child in model.named_children():
        found += [f"{name}.{inner}" if inner else name for inner in compiled_units(child)]
    return found
