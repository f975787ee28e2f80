"""What a run tells while it goes: progress lines, where the time went, memory, and events for the monitors.

Lines that the config asks for (`steps_per_print`, `wall_clock_breakdown`, `memory_breakdown`, `dump_state`) go to
standard output, on rank 0; everything else goes through `logging` under the name `zeroshard`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.clock import PHASES, Clock
from zeroshard.config import Config
from zeroshard.monitor import Monitor
from zeroshard.precision import tensors_in
from zeroshard.update import StepResult

__all__ = ["Progress", "count_tokens", "show_bill", "show_process"]

log = logging.getLogger("zeroshard")

FLOPS_PER_TOKEN = 6
"""Per parameter: 2 in forward and 4 in backward, a multiplication and an addition each; attention scores and
recomputation not counted (Kaplan et al., arXiv 2001.08361, section 2.1)."""

Bill = Sequence[tuple[str, int | None, int]]


def count_tokens(inputs: Any) -> int:
    """Tokens of one forward: elements of the first integer tensor of two dims or more, 0 when there is none."""
    for tensor in tensors_in(inputs):
        integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        if integer and tensor.dim() >= 2:
            return tensor.numel()
    return 0


def show_bill(bill: Bill) -> str:
    """The memory bill of a rank as a table: category, predicted and measured megabytes."""
    lines = [f"{'memory of a rank (MB)':24}{'predicted':>12}{'measured':>12}"]
    for category, predicted, measured in bill:
        expected = "unknown" if predicted is None else f"{predicted / 1e6:.3f}"
        lines.append(f"{category:24}{expected:>12}{measured / 1e6:12.3f}")
    return "\n".join(lines)


def show_process(device: torch.device) -> str:
    """What this process takes as the system counts it: model, activations, libraries and all."""
    import resource  # not on Windows, where nobody asks for memory_breakdown yet

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    text = f"process: {peak / 1e6:.1f} MB resident at most"
    if device.type != "cpu":
        allocated, most = (
            torch.accelerator.memory_allocated(device),
            torch.accelerator.max_memory_allocated(device),
        )
        text += f"; {device.type}: {allocated / 1e6:.1f} MB allocated, {most / 1e6:.1f} MB at most"
    return text


class Progress:
    """Counts and prints for one engine."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        world: int,
        device: torch.device,
        parameters: int,
        clock: Clock | None,
        monitor: Monitor,
    ) -> None:
        """`parameters`: elements of the model, for FLOP/s. `clock`: when `wall_clock_breakdown` is on."""
        self.clock, self.monitor = clock, monitor
        self._every = config.steps_per_print
        self._breakdown, self._memory = config.wall_clock_breakdown, config.memory_breakdown
        self._rank, self._world, self._device, self._parameters = rank, world, device, parameters
        self._losses: list[Tensor] = []
        self._tokens = 0
        self._samples = 0
        self._since = time.perf_counter()

    def saw_inputs(self, inputs: Any) -> None:
        """A forward that trains begins."""
        if self._every or self.monitor.enabled:
            self._tokens += count_tokens(inputs)

    def saw_loss(self, loss: Tensor) -> None:
        """A backward of `loss`: kept to be averaged when an event asks for it, not looked at now."""
        if self.monitor.enabled:
            self._losses.append(loss.detach())

    def stepped(
        self,
        *,
        step: int,
        samples: int,
        step_samples: int | None,
        skipped: int,
        rates: Callable[[], Sequence[float]],
        result: StepResult,
        scaled: bool,
    ) -> None:
        """An optimizer step is done. `samples`: of the whole run so far; `step_samples`: of this step.

        `rates` is asked only when somebody wants to see them: a rate may be a tensor on a device.
        """
        self._samples += step_samples or 0
        due = self._every is not None and step % self._every == 0
        spent = self.clock.read() if self.clock is not None and (due or self._every is None) else None
        if self.monitor.enabled:
            self.monitor.write_events(self._events(samples, rates(), result, scaled, spent))
            self._losses = []
        if self._rank != 0:
            return
        if due:
            print(self._line(step, skipped, rates(), result, scaled), flush=True)
        if spent is not None and self._breakdown:
            print(_time_line(spent), flush=True)

    def tell_bill(self, bill: Bill) -> None:
        """The memory bill, once before the run and once after its first step."""
        text = show_bill(bill)
        self.tell(f"{text}\n{show_process(self._device)}" if self._memory else text, self._memory)

    def tell(self, text: str, asked_for: bool) -> None:
        """On rank 0: printed when the config asks for it, else a message of level INFO."""
        if self._rank == 0 and asked_for:
            print(text, flush=True)
        elif self._rank == 0:
            log.info("%s", text)

    def close(self) -> None:
        self.monitor.close()

    def _line(self, step: int, skipped: int, rates: Sequence[float], result: StepResult, scaled: bool) -> str:
        parts = [f"step {step}", "lr " + ", ".join(f"{rate:.3g}" for rate in rates)]
        if result.grad_norm is not None:
            parts.append(f"gradient norm {result.grad_norm:.4g}")
        if scaled:
            parts.append(f"loss scale {result.loss_scale:g}")
        if skipped:
            parts.append(f"skipped {skipped}")
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        if self._samples:
            parts.append(f"{self._samples / seconds:.1f} samples/s")
        if self._tokens:
            tokens = self._tokens * self._world / seconds
            parts.append(f"{tokens:.0f} tokens/s")
            parts.append(f"{FLOPS_PER_TOKEN * self._parameters * tokens / 1e12:.3f} TFLOP/s")
        self._since, self._samples, self._tokens = now, 0, 0
        return "  ".join(parts)

    def _events(
        self,
        samples: int,
        rates: Sequence[float],
        result: StepResult,
        scaled: bool,
        spent: Mapping[str, float] | None,
    ) -> list[tuple[str, Any, int]]:
        values: dict[str, Any] = {"lr": rates[0] if rates else 0.0}
        if self._losses:
            values["train_loss"] = sum(float(loss) for loss in self._losses) / len(self._losses)
        if scaled:
            values["loss_scale"] = result.loss_scale
        if result.grad_norm is not None:
            values["grad_norm"] = result.grad_norm
        if spent is not None:
            times = {
                "forward": spent["forward"],
                "backward": spent["backward"] + spent["reduce wait"],
                "backward_inner": spent["backward"],
                "backward_allreduce": spent["reduce wait"],
                "step": spent["optimizer"],
            }
            values.update({f"elapsed_time_ms_{name}": 1e3 * value for name, value in times.items()})
        return [(f"Train/Samples/{name}", value, samples) for name, value in values.items()]


def _time_line(spent: Mapping[str, float]) -> str:
    total = max(spent["total"], 1e-9)
    shares = [
        f"{name} {1e3 * spent[name]:.1f} ms ({100 * spent[name] / total:.0f}%)" for name in (*PHASES, "idle")
    ]
    return f"time {1e3 * total:.1f} ms: " + ", ".join(shares)
