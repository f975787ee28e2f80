"""Lanes: where asynchronous work is queued on devices with streams; nothing at all where there are none.

A lane is a side stream with the one ordering the engine adds to torch's own. Safety comes from events and
order, as in FSDP2, not from `record_stream`, which would delay the reuse of memory: what is allocated on a lane is
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
        self._device = device
        self._stream = None if device.type in ("cpu", "meta") else torch.Stream(device)

    @property
    def overlaps(self) -> bool:
        """What is queued on the lane runs beside the compute."""
        return self._stream is not None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queue what happens inside on this lane. Not to be nested: torch's streams cannot be entered twice."""
        if self._stream is None:
            yield
            return
        with self._stream:
            yield

    def wait_for_compute(self) -> None:
        """What is queued on the lane from now on runs after what the current stream has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
