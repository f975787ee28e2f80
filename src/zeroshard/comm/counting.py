"""Counts what an engine sends: calls, bytes of the buffers, bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from zeroshard.comm.bandwidth import sent_share
from zeroshard.comm.seam import Collectives, Work
from zeroshard.comm.wrapper import Wrapper

__all__ = ["CountingCollectives", "Traffic"]


@dataclass(frozen=True)
class Traffic:
    """What one verb moved.

    `buffer_bytes`: of the longest tensor of each call (`full`, or the one tensor). `wire_bytes`: what each
    rank sends at least (`bandwidth.sent_share`), rounded down per call.

    Example: all_gather of a `full` of 1000 bytes on 4 ranks counts 1000 and 750. Shared memory on one host
    sends nothing over a wire; the convention stays the same, so that figures compare.
    """

    calls: int = 0
    buffer_bytes: int = 0
    wire_bytes: int = 0


class CountingCollectives(Wrapper):
    """`inner` with counters around it: `counts()` by verb since the start or the last `reset()`."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self._traffic: dict[str, Traffic] = {}

    def counts(self) -> dict[str, Traffic]:
        return dict(self._traffic)

    def reset(self) -> None:
        self._traffic.clear()

    def launch(self, verb: str, full: Tensor, shard: Tensor | None, start: Callable[[], Work]) -> Work:
        self._count(verb, full)
        return start()

    def finish(self, verb: str, tensor: Tensor, run: Callable[[], Any]) -> None:
        self._count(verb, tensor)
        run()

    def _count(self, verb: str, tensor: Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        before = self._traffic.get(verb, Traffic())
        self._traffic[verb] = replace(
            before,
            calls=before.calls + 1,
            buffer_bytes=before.buffer_bytes + nbytes,
            wire_bytes=before.wire_bytes + int(nbytes * sent_share(verb, self.size)),
        )
