"""Who was first to compute a number that is not finite. Costs nothing until it is armed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.precision import tensors_in

__all__ = ["FiniteProbe"]


class FiniteProbe:
    """Watches the outputs of all modules of a model while armed; looks at them only when asked."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name or "(root)" for name, _ in model.named_modules()]
        self._modules = list(model.modules())
        self._handles: list[RemovableHandle] = []
        self._seen: list[tuple[int, Tensor]] = []

    def arm(self) -> None:
        """Watch from the next forward on."""
        self.clear()
        if not self._handles:
            for index, module in enumerate(self._modules):
                self._handles.append(module.register_forward_hook(self._hook(index), prepend=True))

    def disarm(self) -> None:
        self.clear()
        while self._handles:
            self._handles.pop().remove()

    def close(self) -> None:
        """Let go of the model."""
        self.disarm()
        self._modules.clear()

    def clear(self) -> None:
        """Forget what was seen: a window ended."""
        self._seen = []

    def first(self) -> int:
        """Index (into `names`) of the first module whose output was not finite, -1 when all were."""
        return next((index for index, finite in self._seen if not bool(finite)), -1)

    def _hook(self, index: int) -> Any:
        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.is_grad_enabled():  # an evaluation, or what will be computed again in backward
                return
            if torch.compiler.is_compiling():  # a graph would be compiled anew for each tensor that was seen
                return
            floating = [tensor.detach() for tensor in tensors_in(output) if tensor.is_floating_point()]
            if floating:
                flags = [torch.isfinite(tensor).all() for tensor in floating]
                self._seen.append((index, torch.stack(flags).all()))

        return after_forward
