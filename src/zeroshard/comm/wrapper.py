"""What is put around a seam: the five verbs, led through two methods that a wrapper overrides."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.seam import Collectives, Work

__all__ = ["Wrapper", "labelled"]


class Wrapper:
    """`inner`, unchanged. A wrapper adds what it is for around each `start` and `run`."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.label = ""
        self.size, self.rank = inner.size, inner.rank
        self.record: Any = getattr(inner, "record", None)
        """The flight record, where there is one (`RecordingCollectives`)."""

    def launch(self, verb: str, full: Tensor, shard: Tensor | None, start: Callable[[], Work]) -> Work:
        """An asynchronous verb; `full` is the longest tensor of the call."""
        return start()

    def finish(self, verb: str, tensor: Tensor, run: Callable[[], Any]) -> None:
        """A verb that blocks."""
        run()

    def labelled(self, label: str) -> Collectives:
        """The same group; what is launched through it is about `label`."""
        made = copy(self)
        made.inner, made.label = labelled(self.inner, label), label
        return made

    def all_gather(self, full: Tensor, shard: Tensor, *, stable: bool = False) -> Work:
        return self.launch(
            "all_gather", full, shard, lambda: self.inner.all_gather(full, shard, stable=stable)
        )

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Work:
        return self.launch(
            "reduce_scatter", full, shard, lambda: self.inner.reduce_scatter(shard, full, average=average)
        )

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Work:
        return self.launch("all_reduce", tensor, None, lambda: self.inner.all_reduce(tensor, average=average))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self.finish("broadcast", tensor, lambda: self.inner.broadcast(tensor, source))

    def sum_to_host(self, values: Tensor) -> list[float]:
        sums: list[float] = []
        self.finish("sum_to_host", values, lambda: sums.extend(self.inner.sum_to_host(values)))
        return sums

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        self.inner.close()


def labelled(group: Collectives, label: str) -> Collectives:
    """`group` for collectives that are about `label`: the same object where nobody asks what they are about."""
    return group.labelled(label) if isinstance(group, Wrapper) else group
