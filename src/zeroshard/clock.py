"""Where the time of a step goes: seconds by phase, each moment counted once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["PHASES", "Clock"]

PHASES = ("data", "forward", "backward", "gather wait", "reduce wait", "optimizer")
"""What is timed; the rest of the wall time is `idle`: whatever the script does in between."""


class Clock:
    """A stack of phases: time goes to the innermost, so that all of them add up to at most the wall time.

    On an accelerator each change of phase waits for the device, which slows a step: for measuring only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stack: list[str] = []
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._began = self._since = time.perf_counter()

    def start(self, phase: str) -> None:
        self._charge()
        self._stack.append(phase)

    def stop(self, phase: str) -> None:
        """End `phase`, and what an exception left open inside it. Nothing to do when it is not running."""
        if phase in self._stack:
            self._charge()
            while self._stack.pop() != phase:
                pass

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def read(self) -> dict[str, float]:
        """Seconds by phase, with `idle` and `total`, since the last reading; counting starts anew.

        Between steps, when no phase runs: one that does was left open by an exception, and ends here.
        """
        self._charge()
        spent = {**self._spent}
        total = self._since - self._began
        spent["idle"] = max(total - sum(self._spent.values()), 0.0)
        spent["total"] = total
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._began = self._since
        self._stack = []
        return spent

    def _charge(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = time.perf_counter()
        if self._stack:
            self._spent[self._stack[-1]] += now - self._since
        self._since = now
