"""The loss scale of fp16: what gradients are multiplied by so that small ones do not vanish, and when it moves.

    update(overflow)      condition                        what happens
    overflow              hysteresis used up               scale halves, never below `minimum`
    overflow              otherwise                        one of the tolerated overflows is used up
    clean                 `consecutive`                    the tolerance is refilled
    clean                 `window` clean steps in a row    scale doubles; the tolerance is refilled

The first doubling comes at the (window + 1)-th clean step, later ones every `window`; after an overflow the
count begins anew. The table is DeepSpeed's, except that all stages share it. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LossScale"]

FACTOR = 2.0


class LossScale:
    """A static or dynamic loss scale.

    Example, window 4, hysteresis 2, scale 16, overflows at the first and third step (`x.x.....`):
    16, 16, 8, 8, 8, 8, 8, 16.
    """

    def __init__(
        self,
        value: float,
        *,
        dynamic: bool = False,
        window: int = 1000,
        minimum: float = 1.0,
        hysteresis: int = 1,
        consecutive: bool = False,
    ) -> None:
        """`hysteresis`: overflows before the first halving; `minimum`: the scale never falls below it."""
        if value <= 0 or minimum <= 0 or window < 1 or hysteresis < 1:
            raise ValueError(
                f"loss scale {value}, minimum {minimum}, window {window} and hysteresis {hysteresis} must be "
                f"positive"
            )
        self.value = float(value)
        self.is_dynamic = dynamic
        self._window, self._minimum = window, float(minimum)
        self._hysteresis, self._consecutive = hysteresis, consecutive
        self._left = hysteresis
        self._step = 0
        self._last_overflow = -1

    @property
    def at_minimum(self) -> bool:
        """The next overflow that would halve the scale cannot."""
        return self.is_dynamic and self.value <= self._minimum

    def update(self, overflow: bool) -> bool:
        """A step was attempted; `overflow`: its gradients were not finite, and it is skipped.

        Returns False when the scale should have been halved and is at its minimum already.
        """
        if not self.is_dynamic:
            return True
        possible = True
        if overflow:
            if self._left > 1:
                self._left -= 1
            elif self.at_minimum:
                possible = False
            else:
                self.value = max(self.value / FACTOR, self._minimum)
            self._last_overflow = self._step
        else:
            clean = self._step - self._last_overflow - 1
            due = clean > 0 and clean % self._window == 0
            if due:
                self.value *= FACTOR
            if due or self._consecutive:
                self._left = self._hysteresis
        self._step += 1
        return possible

    def state_dict(self) -> dict[str, Any]:
        """The moving part: scale, tolerance left, step, step of the last overflow."""
        return {
            "scale": self.value,
            "hysteresis": self._left,
            "step": self._step,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = float(state["scale"])
        self._left, self._step = int(state["hysteresis"]), int(state["step"])
        self._last_overflow = int(state["last_overflow"])
