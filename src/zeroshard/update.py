"""What happens around the optimizer's own `step`, whoever calls it.

    before   finish the reductions; agree with all ranks, in one small sum, on the norm, on which parameters have
             a gradient anywhere and on whether all ran the same modules; take the loss scale off and clip, or
             skip the step: drop all gradients, so that the optimizer finds nothing to update
    after    masters into the model's weights; the window is over

A step whose gradients are not finite is skipped on all ranks, whatever the dtype. A loss scale then adapts;
without one, and when the forward itself is not finite, steps that go on failing end the run with an error that
names where the first such number was made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.buffers import FlatBuffer
from zeroshard.comm import ballot, unanimous
from zeroshard.errors import NonFiniteError, ScheduleError, StateError
from zeroshard.finite import FiniteProbe
from zeroshard.gradients import GradientBuffer
from zeroshard.loss_scale import LossScale
from zeroshard.states import States
from zeroshard.tiles import Tiles
from zeroshard.trace import Action, Kind, digest

__all__ = ["PATIENCE", "StepResult", "Update"]

log = logging.getLogger("zeroshard")

PATIENCE = 10
"""Skipped steps in a row after which it is looked into."""


@dataclass(frozen=True)
class StepResult:
    """What the latest optimizer step did."""

    grad_norm: float | None
    """Global L2 norm of the averaged gradients, before clipping and without loss scale; not finite when the
    step was skipped for that; None when nobody needs it (`compute_grad_norm` off, no clipping)."""
    clip_coefficient: float
    """What gradients were multiplied by; 1.0 when they were not clipped."""
    skipped: bool = False
    """Nothing was updated, on any rank: gradients were not finite."""
    loss_scale: float = 1.0
    """The scale the gradients were made with."""


@dataclass(frozen=True)
class _Agreed:
    """What all ranks know after the exchange."""

    norm: float | None
    tokens: float
    """Sum of the weights of all backwards of the window, over all ranks; 0 when they had none."""
    backwards: float
    """Backwards since the last step, over all ranks."""


class Update:
    """The optimizer steps of one engine."""

    def __init__(
        self,
        states: States,
        *,
        clipping: float,
        needs_norm: bool,
        skips: bool,
        tolerates_unused: bool,
        loss_scale: LossScale,
        probe: FiniteProbe,
        names: Sequence[str],
        tiles: Tiles,
    ) -> None:
        """`skips`: gradients that are not finite skip the step. `tolerates_unused`: parameters without any are
        left alone. `names`: parameters in order of definition."""
        self.loss_scale = loss_scale
        self.tiles = tiles
        self.attempted = 0
        """Optimizer steps, applied or skipped."""
        self.skipped = 0
        self.last: StepResult | None = None
        self.backwards = 0
        """Backwards since the last step, dropped ones included."""
        self.gradient_bytes = 0
        """The most that gradients took on this rank so far."""
        self.on_step: Callable[[Optimizer], None] | None = None
        """Called before anything of a step is done."""
        self.trains_digest = 0
        """Of which parameters require grad; equal on all ranks unless somebody set it on some of them."""
        self.who_trains: Callable[[], str] = str
        """The error when it is not, with the name of a parameter. A collective."""
        self._changing: list[FlatBuffer] = []
        """Buckets whose masters the optimizer at work changes."""
        self.requires_backward = False
        """A step that no backward came before is an error, and not nothing (`engine.step`)."""
        self._clipping, self._needs_norm, self._skips = clipping, needs_norm, skips
        self._tolerates_unused = tolerates_unused
        self._states, self._executor, self._probe = states, states.executor, probe
        self._world, self._rank = states.world, states.rank
        self._buffers, self._gradients = states.buffers, states.gradients
        self._trained: list[GradientBuffer] = []
        self._place = {name: index for index, name in enumerate(names)}
        self._in_a_row = 0
        self.backwards = self._dropped = 0
        self._tokens, self._weighted = 0.0, 0
        self.take_in()
        if loss_scale.at_minimum:
            probe.arm()

    def take_in(self) -> None:
        """There are buckets that train from here on, also in the middle of a window."""
        for gradient in self._gradients:
            if gradient is not None and gradient not in self._trained:
                gradient.scale = self.loss_scale.value
        self._trained = [gradient for gradient in self._gradients if gradient is not None]

    # ---- before -------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer's `step` is called with `args` and `kwargs`."""
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise StateError(
                "optimizer.step(closure) is not supported: gradients are reduced before the step. Run the "
                "closure's forward and backward yourself, then call step() without it."
            )
        if getattr(optimizer, "found_inf", None) is not None:
            raise StateError(
                "torch's GradScaler drives this step, and would decide on each rank alone whether to skip it. "
                'Remove it: "fp16" or "torch_autocast" in the config brings a loss scale for all ranks.'
            )
        self.conclude()
        if self.on_step is not None:
            self.on_step(optimizer)
        self._check_nothing_ignored()
        self.take_edits()
        self._states.passes.end_step()
        self._executor.reduces.flush_pending()
        self.gradient_bytes = max(self.gradient_bytes, sum(g.nbytes() for g in self._trained))
        agreed = self._agree()
        if self.requires_backward and not agreed.backwards:
            raise StateError(
                "step() before any backward: there are no gradients to update with. Call engine.backward(loss), "
                "or loss.backward(), first; the loss must come from this engine's outputs."
            )
        if not self._tolerates_unused:
            self._refuse_unused()
        self.attempted += 1
        scale, norm = self.loss_scale.value, agreed.norm
        finite = norm is None or math.isfinite(norm)
        if not finite and self._skips:
            self.skipped += 1
            self.last = StepResult(norm, 1.0, skipped=True, loss_scale=scale)
            self._skip()
            return
        if not finite and self._rank == 0:
            log.warning(
                "step %d: gradients are not finite (norm %s) and are applied, since check_grad_overflow is "
                "false: weights will not be finite either",
                self.attempted,
                norm,
            )
        coefficient = _coefficient(norm, self._clipping) if norm is not None and finite else 1.0
        weight = self._world / agreed.tokens if agreed.tokens else 1.0
        self.tiles.open(optimizer, self._trained, coefficient * weight)
        # Ranks agreed on which parameters have a gradient; where none has, nothing changes.
        pairs = zip(self._buffers, self._gradients, strict=True)
        self._changing = [buffer for buffer, gradient in pairs if gradient is not None and gradient.had]
        self.last = StepResult(norm, coefficient, loss_scale=scale)
        self._in_a_row = 0
        self.loss_scale.update(overflow=False)
        if self.loss_scale.at_minimum:
            self._probe.clear()
        else:
            self._probe.disarm()

    def take_edits(self) -> None:
        """Resident weights that were edited in place reach the masters."""
        for buffer in self._buffers:
            if buffer.layout.resident and buffer.edited():
                buffer.write_back()

    def _check_nothing_ignored(self) -> None:
        """What the update would silently leave out: a `.grad` set by hand."""
        with torch._C.DisableTorchFunctionSubclass():  # the guard would answer the same, at a price
            stray = [
                slot.name
                for buffer in self._buffers
                for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True)
                if parameter.grad is not None
            ]
        if stray:
            raise StateError(
                f"parameter {stray[0]!r} has a .grad that the engine did not collect, and the step would "
                f"ignore it: it was assigned by hand, or requires_grad was set after the forward began. "
                f"Gradients must come from backward(); freeze and unfreeze between two steps."
            )

    def _agree(self) -> _Agreed:
        """One small sum over all ranks."""
        self._forget_dropped()
        order = self._executor.reduces.agreed_order()
        order_digest = digest(Action(Kind.REDUCE, bucket) for bucket in order)
        votes = ballot([self._executor.gather_digest, order_digest, self.trains_digest])
        flags = [float(i in g.had) for g in self._trained for i in range(len(g.layout.slots))]
        counted = float(self.backwards - self._dropped)
        in_time = float(not self._executor.reduces.has_late)
        head = [0.0, self._tokens, float(self._weighted), counted, float(self.backwards), in_time]
        numbers = [*head, *votes, *flags]
        vector = torch.tensor(numbers, dtype=torch.float64, device=self._states.device)
        if self._needs_norm:
            for gradient in self._trained:
                vector[0] += gradient.squared_norm()
        sums = self._states.sum(vector)
        start = len(head) + len(votes)
        same_gathers, same_order, same_trains = unanimous(sums[len(head) : start], self._world)
        if not same_trains:
            raise StateError(self.who_trains())
        if not same_gathers:
            raise ScheduleError(
                f"ranks gathered different parameters since the last step (this is rank {self._rank}): they "
                f"did not run the same modules in the same order, so weights may have been mixed up. Make "
                f"control flow the same on all ranks, or name the part that differs as one unit with "
                f"zero_optimization.leaf_module."
            )
        if same_order:
            self._executor.reduces.order = order
        squares, tokens, weighted, counted, backwards, in_time = sums[: len(head)]
        if in_time < self._world:
            self._executor.reduces.flush_late()
            return self._agree()
        self._adopt_flags(sums[start:])
        if 0 < weighted < counted:
            raise StateError(
                f"{weighted:g} of the {counted:g} backwards of this window, over all ranks, had `tokens`: either "
                f"all have it or none, or their weights cannot be compared"
            )
        # Every replica added the norm of the same gradients, which weighted backwards made larger.
        norm = math.sqrt(squares / self._states.groups.replicate.size) * (
            self._world / tokens if tokens else 1.0
        )
        return _Agreed(norm if self._needs_norm else None, tokens, backwards)

    def _adopt_flags(self, flags: Sequence[float]) -> None:
        """A parameter with a gradient on any rank has one on all; with none anywhere it is left alone."""
        position = 0
        for gradient in self._trained:
            count = len(gradient.layout.slots)
            gradient.had = {i for i in range(count) if flags[position + i] > 0}
            position += count

    def _refuse_unused(self) -> None:
        unused = [
            slot.name
            for buffer, gradient in zip(self._buffers, self._gradients, strict=True)
            if gradient is not None
            for index, slot in enumerate(buffer.layout.slots)
            if index not in gradient.had and slot.numel and buffer.parameters[index].requires_grad
        ]
        if unused:
            raise StateError(
                f"parameter {unused[0]!r} ({len(unused)} in all) got no gradient on any rank, and "
                f"zero_optimization.ignore_unused_parameters is false. Freeze what is not trained, or set it to "
                f"true: such parameters are then left alone."
            )

    def clip(self, max_norm: float) -> float:
        """Clip what is accumulated so far; see `Engine.clip_grad_norm_`."""
        if not max_norm > 0:
            raise StateError(f"clip_grad_norm_({max_norm}): the largest norm must be more than 0")
        self._executor.reduces.flush()
        squares = sum((gradient.squared_norm() for gradient in self._trained), torch.zeros(()))
        total, tokens = self._states.sum([float(squares), self._tokens])
        weight = self._world / tokens if tokens else 1.0
        norm = math.sqrt(total / self._states.groups.replicate.size) * weight
        if math.isfinite(norm):
            for gradient in self._trained:
                gradient.promote(_coefficient(norm, max_norm))
        return norm

    # ---- skipping -----------------------------------------------------------------------------------

    def _skip(self) -> None:
        """Drop what is not finite, and say so: at once, in time, or for the last time."""
        self._in_a_row += 1
        scale = self.loss_scale.value
        possible = self.loss_scale.update(overflow=True)
        report = ""
        forward = False
        repeated = self._in_a_row % PATIENCE == 0
        if repeated or not possible:
            forward, report = self._diagnosis()
        self._executor.reduces.clear()
        self.open_window()
        self._probe.arm()
        times = f"step {self.attempted} was skipped, {self._in_a_row} in a row: gradients are not finite"
        if not possible or (repeated and (forward or not self.loss_scale.is_dynamic)):
            cause = (
                "no loss scale can help"
                if forward
                else f"the loss scale {scale:g} cannot fall any more"
                if self.loss_scale.is_dynamic
                else "the next one will not do better"
            )
            raise NonFiniteError(f"{times}, and {cause}. {report}")
        if self._rank != 0:
            return
        if self.loss_scale.is_dynamic and not repeated:
            log.info("%s; loss scale %g -> %g", times, scale, self.loss_scale.value)
        else:
            log.warning("%s. %s", times, report or "Nothing was updated.")

    def _diagnosis(self) -> tuple[bool, str]:
        """(the forward was not finite already, a sentence on where it began). A collective."""
        places = [0.0] * (2 * self._world)
        module = self._probe.first()
        places[self._rank] = module + 1.0
        places[self._world + self._rank] = self._last_parameter() + 1.0
        sums = self._states.sum(places)
        modules, parameters = sums[: self._world], sums[self._world :]
        for rank, found in enumerate(modules):
            if found:
                return True, (
                    f"The forward was not finite already: module {self._probe.names[int(found) - 1]!r} on rank "
                    f"{rank} was the first to return a value that is not. Look at its inputs and weights, and "
                    f"at the learning rate."
                )
        names = {index: name for name, index in self._place.items()}
        first = names.get(int(max(parameters)) - 1, "?")
        return False, (
            f"The forward was finite; in backward the gradient of parameter {first!r} was the first that is "
            f"not."
        )

    def _last_parameter(self) -> int:
        """The place of the last parameter, the first in backward, with a gradient that is not finite here."""
        found = -1
        for gradient in self._trained:
            for index, slot in enumerate(gradient.layout.slots):
                piece = gradient.piece(index) if gradient.shard is not None else None
                if piece is not None and piece.numel() and not bool(torch.isfinite(piece).all()):
                    found = max(found, self._place[slot.name])
        return found

    # ---- after --------------------------------------------------------------------------------------

    def after(self) -> None:
        """The optimizer has updated the masters."""
        self.conclude()
        self._executor.reduces.clear()
        self.open_window()

    def conclude(self) -> None:
        """Masters into the weights. An optimizer that raised, and was outlived, may have changed some as well: what
        it left counts from the next forward or step on, on all ranks."""
        self.tiles.close()
        while self._changing:
            self._changing.pop(0).refresh()

    def saw_backward(self, tokens: float | None) -> None:
        """A backward begins; with `tokens` it is weighted by them."""
        self._forget_dropped()
        self.backwards += 1
        if tokens is not None:
            self._tokens += tokens
            self._weighted += 1

    def _forget_dropped(self) -> None:
        """Gradients may also be dropped behind our back, by the optimizer's own `zero_grad`."""
        if self.backwards > self._dropped and not any(gradient.had for gradient in self._trained):
            self.drop_window()

    def drop_window(self) -> None:
        """The gradients of this window are dropped. That there were backwards is remembered until the step."""
        self._tokens, self._weighted = 0.0, 0
        self._dropped = self.backwards

    def counters(self) -> dict[str, int]:
        """What is saved of it, besides the loss scale."""
        return {
            "global_steps": self.attempted,
            "skipped_steps": self.skipped,
            "skipped_in_a_row": self._in_a_row,
        }

    def set_counters(self, saved: Mapping[str, Any]) -> None:
        self.attempted, self.skipped = saved["global_steps"], saved["skipped_steps"]
        self._in_a_row = saved.get("skipped_in_a_row", 0)

    def close(self) -> None:
        """Let go of the model and of those who are told, so that nothing has to wait for the garbage collector."""
        self._probe.close()
        self.on_step, self.who_trains = None, str
        self.tiles.close()
        self._trained.clear()
        self._changing.clear()

    def open_window(self) -> None:
        """No backward came yet; gradients from here on have the loss scale of now."""
        self._tokens, self._weighted = 0.0, 0
        self.backwards = self._dropped = 0
        for gradient in self._trained:
            gradient.updating = False
            gradient.scale = self.loss_scale.value


def _coefficient(norm: float, limit: float) -> float:
    """What clips `norm` to `limit`; 0 is no limit. The small number is torch's."""
    return min(limit / (norm + 1e-6), 1.0) if limit > 0 else 1.0
