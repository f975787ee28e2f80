"""One engine's sharded states, what moves them, and over whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard.buffers import FlatBuffer
from zeroshard.comm import Collectives
from zeroshard.executor import Executor
from zeroshard.gradients import GradientBuffer, ShardSlice
from zeroshard.materialize import Groups
from zeroshard.passes import Passes

__all__ = ["States"]


@dataclass(frozen=True, kw_only=True)
class States:
    """Per bucket: its weights, its gradients (None when frozen), what the optimizer holds (empty without one)."""

    buffers: list[FlatBuffer]
    gradients: list[GradientBuffer | None]
    slices: list[tuple[ShardSlice, ...]]
    executor: Executor
    passes: Passes
    groups: Groups
    device: torch.device

    @property
    def world(self) -> int:
        """Data-parallel ranks."""
        return self.groups.gather.size * self.groups.replicate.size

    @property
    def rank(self) -> int:
        """This process's place among them."""
        return self.groups.gather.rank + self.groups.gather.size * self.groups.replicate.rank

    def sum(self, numbers: Sequence[float] | torch.Tensor) -> list[float]:
        """The sum over all ranks, element by element, in float64. A collective."""
        return self._sum(numbers, self.groups.reduce)

    def ask(self, numbers: Sequence[float]) -> list[float]:
        """The same, over the group where a rank that does not ask would come by next: it is noticed at once, and
        not waited for."""
        gathers = any(not buffer.layout.resident for buffer in self.buffers)
        return self._sum(numbers, self.groups.gather if gathers else self.groups.reduce)

    def _sum(self, numbers: Sequence[float] | torch.Tensor, first: Collectives) -> list[float]:
        sums: Sequence[float] | torch.Tensor = numbers
        for group in (first, self.groups.replicate):
            if group.size > 1:
                sums = group.sum_to_host(torch.as_tensor(sums, dtype=torch.float64, device=self.device))
        return sums.tolist() if isinstance(sums, torch.Tensor) else list(sums)

    def close(self) -> None:
        """Let go of everything that has memory."""
        self.buffers.clear()
        self.gradients.clear()
        self.slices.clear()
