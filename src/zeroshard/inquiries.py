"""What an engine can be asked: the accessors that scripts written for DeepSpeed use, the schedule, the memory
bill. They only look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zeroshard.memory import MemoryBill, predict_memory
from zeroshard.optimizer import state_bytes, state_elements
from zeroshard.precision import DTYPES
from zeroshard.tiles import Tiles

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from zeroshard.access import Access
    from zeroshard.boundary import Boundary
    from zeroshard.config import BatchPlan, Config
    from zeroshard.executor import Executor
    from zeroshard.guard import Status
    from zeroshard.layout import Layout
    from zeroshard.policy import Policy
    from zeroshard.schedule import Schedule
    from zeroshard.states import States
    from zeroshard.update import StepResult, Update

__all__ = ["Inquiries"]


class Inquiries:
    """A base of `Engine`."""

    _config: Config
    policy: Policy
    optimizer: Optimizer | None
    _batch: BatchPlan
    _update: Update
    _boundary: Boundary
    _states: States
    _access: Access
    _executor: Executor

    @property
    def config(self) -> Config:
        """The config that was given, parsed: every key, with its default where it was left out."""
        return self._config

    # ---- steps --------------------------------------------------------------------------------------

    @property
    def last_step(self) -> StepResult | None:
        """What the latest optimizer step did: norm before clipping, coefficient, whether it was skipped."""
        return self._update.last

    @property
    def global_steps(self) -> int:
        """Optimizer steps attempted, skipped ones included, as DeepSpeed counts."""
        return self._update.attempted

    @property
    def skipped_steps(self) -> int:
        """Of those: skipped, because gradients were not finite."""
        return self._update.skipped

    @property
    def applied_steps(self) -> int:
        """Of those: applied."""
        return self._update.attempted - self._update.skipped

    def was_step_applied(self) -> bool:
        """The latest optimizer step changed the weights."""
        return self._update.last is not None and not self._update.last.skipped

    def get_global_grad_norm(self) -> float | None:
        """Global L2 norm of the latest step's averaged gradients, before clipping, without loss scale."""
        return None if self._update.last is None else self._update.last.grad_norm

    # ---- batch --------------------------------------------------------------------------------------

    def train_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks; None when neither config nor loader says."""
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per rank and forward."""
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._batch.accumulation_steps

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """(train batch size, micro-batch size, accumulation steps)."""
        return self._batch.train_batch_size, self._batch.micro_batch_size, self._batch.accumulation_steps

    # ---- optimizer ----------------------------------------------------------------------------------

    def _groups_of(self, key: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(key) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """Learning rate of each group."""
        return [float(rate) for rate in self._groups_of("lr")]

    def get_mom(self) -> list[Any]:
        """Momentum of each group, or its betas."""
        pairs = zip(self._groups_of("momentum"), self._groups_of("betas"), strict=True)
        return [betas if momentum is None else momentum for momentum, betas in pairs]

    def get_type(self) -> list[Any]:
        """`type` of each group, None where a group has none."""
        return self._groups_of("type")

    def optimizer_name(self) -> str | None:
        """The class of the optimizer; None without one."""
        return None if self.optimizer is None else type(self.optimizer).__name__

    def scheduler_name(self) -> str | None:
        """`scheduler.type` of the config."""
        return self._config.scheduler.type

    # ---- precision ----------------------------------------------------------------------------------

    def loss_scale(self) -> float:
        """What the loss is multiplied by; 1.0 without fp16."""
        return self._update.loss_scale.value

    @property
    def cur_scale(self) -> float:
        """The same, as an attribute."""
        return self._update.loss_scale.value

    def dynamic_loss_scale(self) -> bool:
        """The loss scale adapts."""
        return self._update.loss_scale.is_dynamic

    def fp16_enabled(self) -> bool:
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self._config.bf16.enabled

    def torch_autocast_enabled(self) -> bool:
        return self._config.torch_autocast.enabled

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(what the model computes in, what gradients are accumulated in)."""
        return DTYPES[self._config.compute_dtype], DTYPES[self._config.grad_accum_dtype]

    # ---- settings -----------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        """The stage is 1 or more."""
        return self.policy.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.policy.stage

    def gradient_clipping(self) -> float:
        """Largest global norm; 0 is no clipping."""
        return self._config.gradient_clipping

    def steps_per_print(self) -> int | None:
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        return self._config.memory_breakdown

    # ---- what happens -------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Which parameters travel together, and where each one lies."""
        return self._executor.layout

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the latest finished path: prints as `0GATHER 0WAIT 0F ...`. None before there is one.

        A path is finished by the step, or by the next forward from outside.
        """
        schedules = self._executor.paths.schedules
        return schedules[-1] if schedules else None

    def status(self, parameter: nn.Parameter) -> Status:
        """Whether a parameter's full weights are here: NOT_AVAILABLE, INFLIGHT or AVAILABLE."""
        return self._states.buffers[self._access.buckets_of(parameter)[0]].status

    def predicted_memory(self) -> MemoryBill:
        """This rank's bill from the layout; the gathered peak from the schedules known so far."""
        return predict_memory(
            self.layout,
            self.policy,
            rank=self._states.groups.gather.rank,
            state_elements=state_elements(self.optimizer),
            accumulates=self.policy.accumulate_dtype is not None,
            gathered_peak=self._executor.paths.predicted_peak(),
            tile=self.policy.tile if self.optimizer is not None and Tiles.suit(self.optimizer) else None,
        )

    def measured_memory(self) -> MemoryBill:
        """This rank's bill counted from the tensors that exist; gradients and the peak as of the most so far."""
        parameters = master = 0
        for buffer in self._states.buffers:
            parameters += buffer.nbytes
            if buffer.master is not None and buffer.master is not buffer.shard:
                master += buffer.master.numel() * buffer.master.element_size()
        return MemoryBill(
            parameters=parameters,
            gradients=self._update.gradient_bytes,
            master=master,
            optimizer_state=0 if self.optimizer is None else state_bytes(self.optimizer),
            gathered_peak=self._executor.peak_gathered,
            update_peak=self._update.tiles.peak,
        )

    def memory(self) -> list[tuple[str, int | None, int]]:
        """This rank's bill: (category, predicted bytes, measured bytes) for each of `memory.CATEGORIES`."""
        pairs = zip(self.predicted_memory().rows(), self.measured_memory().rows(), strict=True)
        return [(category, predicted, measured or 0) for (category, predicted), (_, measured) in pairs]
