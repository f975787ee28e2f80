"""What happens where tensors enter and leave the model: inputs are cast, autocast begins and ends, and under a
loss scale gradients are multiplied where they come in and divided where they go out.

    loss --> gradient of an output  --(x scale)-->  the model's backward  --(/ scale)-->  gradient of an input

So a plain `loss.backward()` needs no scaling by the user, several engines in one loss each have a scale of their
own, and tensors outside the model have true gradients. A loss that was scaled as a whole (`scaled`, which
`engine.backward` calls) is known to carry its scale already, and is only corrected from one engine's scale to
another's. The model's boundary is its outermost forward: the root's, or that of a part that is called directly.

A part of the loss that leaves the model another way, such as an attribute set in forward, is scaled by
`engine.backward` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import StateError
from zeroshard.loss_scale import LossScale
from zeroshard.precision import cast_floating, map_tensors
from zeroshard.wording import first_few

__all__ = ["Boundary", "carried_tokens"]


@dataclass(frozen=True)
class _Carried:
    """What a loss was multiplied by as a whole, for all engines that its backward reaches."""

    scale: float = 1.0
    tokens: float | None = None


_carried: dict[int, _Carried] = {}
"""By autograd graph task. Shared by all engines."""


class Boundary:
    """The boundary of one model."""

    def __init__(
        self,
        *,
        device: torch.device,
        compute: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """`compute`: what floating-point inputs are cast to. `loss_scale`: None when there is none."""
        self._compute, self._autocast, self._device = compute, autocast, device
        self.loss_scale = loss_scale
        self._contexts: list[torch.autocast] = []
        self._scaled_tasks: set[int] = set()

    @property
    def does_nothing(self) -> bool:
        return self._compute is None and self._autocast is None and self.loss_scale is None

    def explain(self, error: Exception, model: nn.Module) -> None:
        """Note at an error about dtypes that a forward raised which buffers are of another one."""
        told = str(error)
        if self._compute is None or not ("dtype" in told or "scalar type" in told):
            return
        wide = [name for name, buffer in model.named_buffers() if buffer.dtype is torch.float32]
        if wide and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(
                f"The model computes in {self._compute}, and what it computes with its fp32 buffers "
                f"({first_few(wide, 3)}) is fp32. To cast buffers, set data_types.buffer_dtype in the "
                f"config; to keep a module in fp32 with its inputs, name it in data_types.keep_in_fp32_modules"
            )

    def enter(self, inputs: Any, in_backward: bool) -> Any:
        """The outermost forward begins: the inputs as the model is to see them.

        `in_backward`: it is recomputed, and its gradients are in the middle of the model.
        """
        if self.loss_scale is not None and not in_backward:
            self._forget_failed()
            inputs = map_tensors(self._leave_tensor, inputs)
        if self._compute is not None:
            inputs = cast_floating(inputs, self._compute)
        if self._autocast is not None:
            context = torch.autocast(self._device.type, dtype=self._autocast)
            context.__enter__()  # type: ignore[no-untyped-call]
            self._contexts.append(context)
        return inputs

    def leave(self, outputs: Any, in_backward: bool) -> Any:
        """The outermost forward ended, perhaps by an exception: the outputs as the caller is to see them."""
        if self._contexts:
            self._contexts.pop().__exit__(None, None, None)
        if self.loss_scale is None or in_backward:
            return outputs
        return map_tensors(self._enter_tensor, outputs)

    def abandon(self) -> None:
        """Forwards ended in a way that runs no hooks."""
        while self._contexts:
            self._contexts.pop().__exit__(None, None, None)

    def scaled(self, loss: Tensor, tokens: float | None = None) -> Tensor:
        """`loss` times the loss scale and the tokens it is a mean of, for a backward of the whole of it."""
        self._forget_failed()
        if self.loss_scale is None and tokens is None:
            return loss
        if getattr(loss, "_zeroshard_scaled", False):
            raise StateError(
                f"a loss that was scaled already ({float(loss.detach()):g}) would be scaled twice, and its "
                f"gradients be too large by the loss scale. Use engine.backward(loss), or "
                f"engine.scale(loss).backward(), not both"
            )
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        factor = scale * (1.0 if tokens is None else tokens)
        scaled = loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor  # fp16 would overflow

        def carry(_: Tensor) -> None:
            task = _graph_task()
            _carried[task] = _Carried(scale, tokens)
            self._is_scaled_in(task)
            _at_end(lambda: _carried.pop(task, None))

        scaled.register_hook(carry)  # type: ignore[no-untyped-call]
        scaled._zeroshard_scaled = True  # type: ignore[attr-defined]
        return scaled

    def check_scaled(self, parameter: str) -> None:
        """A gradient arrives in backward. StateError when nothing has scaled it."""
        if self.loss_scale is not None and not self._scaled_tasks:
            raise StateError(
                f"a gradient reached parameter {parameter!r} without the loss scale of fp16: the loss does not "
                f"come from the outputs of the model's forward (a regulariser over its weights, an attribute it "
                f"set, a checkpoint around it, an output in an object that is no list, tuple, dict or dataclass). "
                f"Cure: engine.backward(loss), or engine.scale(loss).backward()."
            )

    def _enter_tensor(self, tensor: Tensor) -> Tensor:
        return _crossing(tensor, self._enter_backward) if tensor.requires_grad else tensor

    def _enter_backward(self, gradient: Tensor) -> Tensor:
        assert self.loss_scale is not None
        self._is_scaled_in(_graph_task())
        # A gradient that is differentiated again (create_graph) enters the model here as well.
        return self._leave_tensor(gradient) * (self.loss_scale.value / _carried_now().scale)

    def _leave_tensor(self, tensor: Tensor) -> Tensor:
        floating = tensor.requires_grad and tensor.is_floating_point()
        return _crossing(tensor, self._leave_backward) if floating else tensor

    def _leave_backward(self, gradient: Tensor) -> Tensor:
        assert self.loss_scale is not None
        return self._enter_tensor(gradient * (_carried_now().scale / self.loss_scale.value))

    def _forget_failed(self) -> None:
        """A backward that raised ends without its callbacks. When none runs, what is left is of such ones."""
        if _graph_task() == -1:
            _carried.clear()
            self._scaled_tasks.clear()

    def _is_scaled_in(self, task: int) -> None:
        if task not in self._scaled_tasks:
            self._scaled_tasks.add(task)
            _at_end(lambda: self._scaled_tasks.discard(task))


class _Crossing(torch.autograd.Function):
    """The same values on the other side of the boundary; `backward` is what happens to gradients on their way.

    Not a hook on a view: an operation in place (`loss /= 4`) leaves the node of a view out of backward.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.on_gradient = backward
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.on_gradient(*gradients), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward-mode derivatives have no scale."""
        return tangents[0].detach()


def _crossing(tensor: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
    crossed: Tensor = _Crossing.apply(tensor, backward)  # type: ignore[no-untyped-call]
    return crossed


def carried_tokens() -> float | None:
    """The tokens that the loss of the running backward is weighted by; None when it is not."""
    return _carried_now().tokens


def _carried_now() -> _Carried:
    """Of the innermost backward that carries something: recomputation runs backwards inside others."""
    return next(reversed(_carried.values()), _Carried())


def _graph_task() -> int:
    return int(torch._C._current_graph_task_id())


def _at_end(callback: Any) -> None:
    """Run `callback` when the running backward ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
