"""Lanes: where asynchronous work is queued on devices with streams; nothing at all where there are none.

A lane is a side stream with the three orderings the engine needs. Safety comes from events and order, as in
FSDP2, and not from `record_stream`, which would delay the reuse of memory: what is allocated on a lane is
given back on that lane, after it has waited for the compute that read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Lane"]


class Lane:
    """A side stream of `device`, or no stream at all when the device is synchronous (CPU, meta)."""

    def __init__(self, device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator() if device.type not in ("cpu", "meta") else None
        self._stream = torch.Stream(device) if accelerator is not None else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queue what happens inside on this lane."""
        if self._stream is None:
            yield
            return
        with self._stream:
            yield

    def wait_for_compute(self) -> None:
        """What is queued on the lane from now on runs after what the current stream has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())

    def hold_compute(self) -> None:
        """What the current stream is given from now on runs after what is queued on the lane."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
