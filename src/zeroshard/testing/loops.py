"""The ways to write a training loop, each once, for a comparison to run on both of its sides.

A loop is a function of one `Window`: the micro-batches of one optimizer step on one rank. Under zeroshard every
rank runs it. Plain PyTorch runs it once per rank in one process, with gradients that end up divided by the
ranks (or weighted by tokens, as `engine.backward(loss, tokens=)` promises), and updates after the last one:

    zeroshard, on rank r     loop(window r), whose `step` updates
    plain PyTorch            loop(window 0), ..., loop(window N - 1), then one update
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zeroshard.precision import map_tensors, tensors_in

__all__ = ["LOOPS", "Loop", "Window"]


class Window(ABC):
    """One rank's part of one step."""

    def __init__(
        self,
        inputs_of: Callable[[int], Any],
        loss_fn: Callable[[Any], Tensor],
        *,
        rank: int,
        micro_batches: int,
    ) -> None:
        """`inputs_of`: the model's inputs by micro-batch. `micro_batches`: gradient_accumulation_steps."""
        self.rank, self.micro_batches = rank, micro_batches
        self.losses: list[float] = []
        """Of every forward so far."""
        self._inputs_of, self._loss_fn = inputs_of, loss_fn

    def loss(self, micro: int, rows: int | None = None) -> Tensor:
        """Call the model on a micro-batch, or on its first `rows` samples; a scalar."""
        inputs = self._inputs_of(micro)
        if rows is not None:
            inputs = map_tensors(lambda tensor: tensor[:rows], inputs)
        loss = self._loss_fn(self._forward(inputs))
        self.losses.append(float(loss.detach()))
        return loss

    def rows(self, micro: int) -> int:
        """Samples of a micro-batch."""
        return len(tensors_in(self._inputs_of(micro))[0])

    @abstractmethod
    def _forward(self, inputs: Any) -> Any:
        """The model's output."""

    @abstractmethod
    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """`loss.backward(gradient)`."""

    @abstractmethod
    def step(self) -> None:
        """`optimizer.step(); scheduler.step(); optimizer.zero_grad()`."""

    @abstractmethod
    def managed_backward(self, loss: Tensor, tokens: float | None = None) -> None:
        """`engine.backward(loss, tokens=tokens)`."""

    @abstractmethod
    def managed_step(self) -> None:
        """`engine.step()`."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """`engine.no_sync()`."""

    @abstractmethod
    def set_boundary(self, is_boundary: bool | None) -> None:
        """`engine.set_gradient_accumulation_boundary(is_boundary)`."""


Loop = Callable[[Window], None]


def managed(window: Window) -> None:
    """`engine.backward(loss); engine.step()` on every micro-batch."""
    for micro in range(window.micro_batches):
        window.managed_backward(window.loss(micro))
        window.managed_step()


def plain(window: Window) -> None:
    """`loss.backward()` on every micro-batch; `optimizer.step(); optimizer.zero_grad()`."""
    for micro in range(window.micro_batches):
        window.backward(window.loss(micro))
    window.step()


def several_forwards(window: Window) -> None:
    """Three forwards, then one backward of their sum."""
    first, second, third = window.loss(0), window.loss(1), window.loss(2)
    window.backward(first + second + third)
    window.step()


def several_backwards(window: Window) -> None:
    """Three backwards before a step, whatever the accumulation steps of the config are."""
    for micro in range(3):
        window.backward(window.loss(micro))
    window.step()


def retain_graph(window: Window) -> None:
    """Two backwards through one graph."""
    loss = window.loss(0)
    window.backward(loss, retain_graph=True)
    window.backward(loss)
    window.step()


def non_scalar(window: Window) -> None:
    """Backward of a vector, with a gradient given for it."""
    losses = torch.stack([window.loss(0), window.loss(1)])
    window.backward(losses, gradient=torch.tensor([0.25, 0.75], dtype=losses.dtype))
    window.step()


def two_inputs(window: Window) -> None:
    """One model on two inputs, in a loss that is no sum of theirs."""
    window.backward(window.loss(0) * window.loss(1))
    window.step()


def no_sync(window: Window) -> None:
    """Two backwards that only accumulate locally, then one that reduces the sum."""
    with window.no_sync():
        window.backward(window.loss(0))
        window.backward(window.loss(1))
    window.backward(window.loss(2))
    window.step()


def cut_short(window: Window) -> None:
    """A managed window that ends one micro-batch early, as at the end of an epoch."""
    last = max(window.micro_batches - 2, 0)
    for micro in range(last + 1):
        window.set_boundary(micro == last)
        window.managed_backward(window.loss(micro))
        window.managed_step()
    window.set_boundary(None)


def tokens(window: Window) -> None:
    """Micro-batches of unequal sizes, each weighted by its size: the mean over all samples of all ranks."""
    for micro in range(window.micro_batches):
        rows = 1 + (micro + window.rank) % window.rows(micro)
        window.managed_backward(window.loss(micro, rows), tokens=rows)
        window.managed_step()


LOOPS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (
        managed,
        plain,
        several_forwards,
        several_backwards,
        retain_graph,
        non_scalar,
        two_inputs,
        no_sync,
        cut_short,
        tokens,
    )
}
"""By the name that `assert_parity(loop=)` and `zeroshard check` take."""
