"""The engine: a model that trains with its states sharded.

    engine(batch); engine.backward(loss); engine.step()             the managed loop
    loss.backward(); optimizer.step(); optimizer.zero_grad()        the plain loop, at every stage

Both end in the optimizer's own `step`: before it, reductions are finished, the norm is taken and gradients
are clipped; after it, the model's copy of the weights is refreshed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zeroshard.buffers import FlatBuffer, Status
from zeroshard.comm import ballot, unanimous
from zeroshard.config import BatchPlan, Config
from zeroshard.errors import ScheduleError, ShardedAccessError, StateError
from zeroshard.executor import Executor
from zeroshard.gradients import GradientBuffer, ShardSlice
from zeroshard.guard import home_of
from zeroshard.layout import Layout
from zeroshard.materialize import Groups
from zeroshard.memory import MemoryBill, predict_memory
from zeroshard.optimizer import STATE_ELEMENTS, state_bytes
from zeroshard.policy import Policy
from zeroshard.precision import squared_norm
from zeroshard.schedule import Schedule
from zeroshard.trace import Action, Kind, digest

__all__ = ["Engine", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What the latest optimizer step did."""

    grad_norm: float
    """Global L2 norm of the averaged gradients, before clipping."""
    clip_coefficient: float
    """What gradients were multiplied by; 1.0 when they were not clipped."""


class Engine(nn.Module):
    """A model, its optimizer, and the machinery between them. Made by `zeroshard.initialize`.

    Attribute access that the engine does not know falls through to the module.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: Config,
        batch: BatchPlan,
        policy: Policy,
        layout: Layout,
        groups: Groups,
        buffers: Sequence[FlatBuffer],
        gradients: Sequence[GradientBuffer | None],
        executor: Executor,
        handles: list[RemovableHandle],
        optimizer: Optimizer | None,
        scheduler: Any,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.module = module
        self.config, self.policy, self.layout, self.device = config, policy, layout, device
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self.training_dataloader: Any = None
        self.global_steps = 0
        """Optimizer steps taken."""
        self.micro_steps = 0
        """Calls of `step`, boundary or not."""
        self.last_step: StepResult | None = None
        self._batch = batch
        self._groups = groups
        self._flat_buffers = tuple(buffers)  # `_buffers` is nn.Module's own
        self._gradients = tuple(gradients)
        self._executor, self._handles = executor, handles
        self._boundary: bool | None = None
        self._managed_backward = False
        self._backwards = 0
        self._sync = True
        self._closed = False
        self._gradient_bytes = 0
        self._rank = groups.gather.rank + groups.gather.size * groups.replicate.rank
        self._printed = (0, time.perf_counter())
        executor.on_backward = self._begin_backward
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_optimizer)  # stays, to refuse a step after close()
            handles.append(optimizer.register_step_post_hook(self._after_optimizer))

    # ---- the loop -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Floating-point inputs are cast to the compute dtype under bf16."""
        self._check_open("forward")
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of a scalar loss, divided by the accumulation steps unless `scale_wrt_gas` is false.

        Returns the loss that was differentiated. Gradients of the window add up to the mean over its
        micro-batches and over all ranks.
        """
        self._check_open("backward")
        if loss.numel() != 1 or not loss.requires_grad:
            raise StateError(
                f"backward wants a loss of one element that requires grad, got shape {tuple(loss.shape)} with "
                f"requires_grad={loss.requires_grad}. For other outputs call `tensor.backward(gradient)`."
            )
        if scale_wrt_gas and self._batch.accumulation_steps > 1:
            loss = loss / self._batch.accumulation_steps
        self._managed_backward = True
        try:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self._managed_backward = False
        return loss.detach()

    def step(self) -> StepResult | None:
        """End of a micro-batch. At the boundary: update the weights, drop gradients, tick the scheduler.

        Returns what the update did, None when this was not the boundary.
        """
        self._check_open("step")
        if self.optimizer is None:
            raise StateError("step() needs an optimizer; give one to `initialize`, in the call or the config")
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return None
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self._rank == 0:
            self._print_progress()
        return self.last_step

    def _print_progress(self) -> None:
        """The line of `steps_per_print`: on standard output, since it was asked for."""
        assert self.optimizer is not None
        rates = ", ".join(f"{group['lr']:.3g}" for group in self.optimizer.param_groups)
        line = f"step {self.global_steps}  lr {rates}"
        if self.last_step is not None:
            line += f"  gradient norm {self.last_step.grad_norm:.4g}"
        now = time.perf_counter()
        steps, seconds = self.global_steps - self._printed[0], now - self._printed[1]
        if self._batch.train_batch_size is not None and seconds > 0:
            line += f"  {self._batch.train_batch_size * steps / seconds:.1f} samples/s"
        self._printed = (self.global_steps, now)
        print(line, flush=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the window, reduced or not."""
        self._executor.reduces.clear()
        self._backwards = 0
        for parameter in self.module.parameters():
            parameter.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate locally; the next one outside, or the step, reduces the sum.

        The price is memory: each rank holds the full gradient of the model meanwhile, at every stage.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def is_gradient_accumulation_boundary(self) -> bool:
        """The next `step()` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._batch.accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand whether the next `step()` updates; overrides counting until it is called again."""
        self._boundary = is_boundary

    def _begin_backward(self) -> None:
        """Stages 0 and 1 reduce when a step is due after this backward; 2 and 3 every time."""
        self._backwards += 1
        if self._managed_backward or self._boundary is not None:
            due = self.is_gradient_accumulation_boundary()
        else:
            due = self._backwards % self._batch.accumulation_steps == 0
        self._executor.reduces.enabled = self._sync and (self.policy.reduce_every_backward or due)

    # ---- around the optimizer -----------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._check_open("optimizer.step")
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise StateError(
                "optimizer.step(closure) is not supported: gradients are reduced before the step"
            )
        self._check_nothing_ignored(optimizer)
        for buffer in self._flat_buffers:
            if buffer.layout.resident and buffer.edited():
                buffer.write_back()
        self._executor.end_step()
        self._executor.reduces.flush()
        self._gradient_bytes = max(self._gradient_bytes, sum(g.nbytes() for g in self._trained()))
        norm = self._agree()
        coefficient = self._clip(norm)
        self.last_step = StepResult(norm, coefficient)
        for gradient in self._trained():
            gradient.updating = True

    def _check_nothing_ignored(self, optimizer: Optimizer) -> None:
        """What the update would silently leave out: a `.grad` set by hand, a parameter of a new group."""
        with torch._C.DisableTorchFunctionSubclass():  # the guard would answer the same, at a price
            stray = [
                slot.name
                for buffer in self._flat_buffers
                for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True)
                if parameter.grad is not None
            ]
        if stray:
            raise StateError(
                f"parameter {stray[0]!r} has a .grad that the engine did not collect, and the step would "
                f"ignore it: it was assigned by hand, or the parameter was frozen when `initialize` saw it "
                f"and trains now. Gradients must come from backward(); of what is to be unfrozen later, set "
                f"requires_grad to False only after `initialize`."
            )
        for number, group in enumerate(optimizer.param_groups):
            if not all(isinstance(parameter, ShardSlice) for parameter in group["params"]):
                raise StateError(
                    f"the optimizer's group {number} got parameters after `initialize`, which the step would "
                    f"ignore. Give the optimizer all its groups before `initialize`; a group of lr 0 may "
                    f"wait its turn."
                )

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for buffer, gradient in zip(self._flat_buffers, self._gradients, strict=True):
            # Ranks agreed on which parameters have a gradient; where none has, nothing changed.
            if gradient is not None and gradient.had:
                buffer.refresh()
        for gradient in self._trained():
            gradient.updating = False
        self._executor.reduces.clear()
        self._backwards = 0
        self.global_steps += 1

    def _agree(self) -> float:
        """One small sum over all ranks: the norm, which parameters have a gradient anywhere, and whether
        ranks ran the same gathers. Returns the global gradient norm."""
        order = self._executor.reduces.agreed_order()
        order_digest = digest(Action(Kind.REDUCE, bucket) for bucket in order)
        votes = ballot([self._executor.gather_digest, order_digest])
        flags = [float(i in g.had) for g in self._trained() for i in range(len(g.layout.slots))]
        vector = torch.tensor([0.0, *votes, *flags], dtype=torch.float64, device=self.device)
        for gradient in self._trained():
            if gradient.shard is not None:
                vector[0] += squared_norm(gradient.shard)
        sums = self._groups.reduce.sum_to_host(vector)
        if self._groups.replicate.size > 1:
            vector = torch.tensor(sums, dtype=torch.float64, device=self.device)
            sums = self._groups.replicate.sum_to_host(vector)
        same_gathers, same_order = unanimous(sums[1 : 1 + len(votes)], self.policy.world)
        if not same_gathers:
            raise ScheduleError(
                f"ranks gathered different parameters since the last step (this is rank {self._rank}): they "
                f"did not run the same modules in the same order, so weights may have been mixed up. Make "
                f"control flow the same on all ranks, or name the part that differs as one unit with "
                f"zero_optimization.leaf_module."
            )
        if same_order:
            self._executor.reduces.order = order
        self._adopt_flags(sums[1 + len(votes) :])
        # Every replica added the norm of the same gradients.
        return float((sums[0] / self._groups.replicate.size) ** 0.5)

    def _adopt_flags(self, flags: Sequence[float]) -> None:
        """A parameter with a gradient on any rank has one on all; with none anywhere it is left alone."""
        position = 0
        for gradient in self._trained():
            count = len(gradient.layout.slots)
            gradient.had = {i for i in range(count) if flags[position + i] > 0}
            position += count

    def _clip(self, norm: float) -> float:
        limit = self.config.gradient_clipping
        coefficient = min(limit / (norm + 1e-6), 1.0) if limit > 0 else 1.0
        if coefficient != 1.0:
            for gradient in self._trained():
                total = gradient.promote()
                if total is not None:
                    total.mul_(coefficient)
        return coefficient

    def _trained(self) -> Iterator[GradientBuffer]:
        return (gradient for gradient in self._gradients if gradient is not None)

    # ---- access -------------------------------------------------------------------------------------

    @contextmanager
    def gathered(
        self,
        params: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None,
        modifier_rank: int | None = None,
    ) -> Iterator[None]:
        """Full weights of `params` (a module, a parameter, several; default all) inside the block.

        All ranks enter and leave together. Edits are kept when `modifier_rank` says whose count; without it
        an edit raises on leaving, since ranks could have edited differently.
        """
        self._check_open("gathered")
        buckets = self._buckets_of(params)
        with self._executor.holding(buckets):
            held = [self._flat_buffers[index] for index in buckets]
            for buffer in held:
                buffer.accept_edits()
            # The fingerprint also sees edits through `.data`, which leave no version behind.
            before = [buffer.fingerprint() for buffer in held] if modifier_rank is None else []
            edited = False
            try:
                yield
                edited = modifier_rank is None and (
                    any(buffer.edited() for buffer in held)
                    or before != [buffer.fingerprint() for buffer in held]
                )
            finally:
                for buffer in held:
                    buffer.accept_edits()
            if edited:
                raise ShardedAccessError(
                    "weights were edited inside engine.gathered() without modifier_rank. Cure: "
                    "`engine.gathered(params, modifier_rank=0)` keeps rank 0's edit on all ranks. If you did "
                    "not mean to edit, look for an in-place operation on a parameter."
                )
            if modifier_rank is not None:
                self._keep_edits(buckets, modifier_rank)

    def _keep_edits(self, buckets: Sequence[int], source: int) -> None:
        replica, rank = divmod(source, self._groups.gather.size)
        for index in buckets:
            buffer = self._flat_buffers[index]
            self._groups.gather.broadcast(buffer.full, rank)
            self._groups.replicate.broadcast(buffer.full, replica)
        # Peers may still be reading this rank's shards for the gather that opened the block.
        self._groups.gather.sum_to_host(torch.zeros(1, dtype=torch.float64, device=self.device))
        for index in buckets:
            self._flat_buffers[index].write_back()

    def _buckets_of(self, params: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None) -> list[int]:
        if params is None:
            return list(range(len(self._flat_buffers)))
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, nn.Parameter):
            params = [params]
        found: dict[int, None] = {}
        for parameter in params:
            home = home_of(parameter)
            if home is None or home.buffer not in self._flat_buffers:
                raise ShardedAccessError(
                    f"engine.gathered() got a tensor of shape {tuple(parameter.shape)} that is not one of this "
                    f"engine's parameters"
                )
            found[home.buffer.layout.index] = None
        return sorted(found)

    def full_fp32(self, parameter: nn.Parameter) -> Tensor:
        """A new tensor with the values the optimizer updates, in the parameter's shape. All ranks call it."""
        buffer = self._flat_buffers[self._buckets_of(parameter)[0]]
        slot = buffer.layout.slots[home_of(parameter).index]
        return buffer.full_master()[slot.offset : slot.end].view(slot.spec.shape).clone()

    def status(self, parameter: nn.Parameter) -> Status:
        """Whether a parameter's full weights are here: NOT_AVAILABLE, INFLIGHT or AVAILABLE."""
        return self._flat_buffers[self._buckets_of(parameter)[0]].status

    # ---- what happens -------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the latest finished path: prints as `0GATHER 0WAIT 0F ...`. None before there is one.

        A path is finished by the step, or by the next forward from outside.
        """
        schedules = self._executor.paths.schedules
        return schedules[-1] if schedules else None

    @property
    def executor(self) -> Executor:
        """The running half, for observers (`on_action`) and measurements."""
        return self._executor

    def get_global_grad_norm(self) -> float | None:
        """Global L2 norm of the latest step's averaged gradients, before clipping."""
        return None if self.last_step is None else self.last_step.grad_norm

    def predicted_memory(self) -> MemoryBill:
        """This rank's bill from the layout; the gathered peak from the schedules known so far."""
        name = "" if self.optimizer is None else type(self.optimizer).__name__
        return predict_memory(
            self.layout,
            self.policy,
            rank=self._groups.gather.rank,
            state_elements=STATE_ELEMENTS.get(name),
            accumulates=self.policy.accumulate_dtype is not None,
            gathered_peak=self._executor.paths.predicted_peak(),
        )

    def measured_memory(self) -> MemoryBill:
        """This rank's bill counted from the tensors that exist; gradients and the peak as of the most so far."""
        parameters = master = 0
        for buffer in self._flat_buffers:
            tensor = buffer.full if buffer.layout.resident else buffer.shard
            parameters += tensor.numel() * tensor.element_size()
            if buffer.master is not None and buffer.master is not buffer.shard:
                master += buffer.master.numel() * buffer.master.element_size()
        return MemoryBill(
            parameters=parameters,
            gradients=self._gradient_bytes,
            master=master,
            optimizer_state=0 if self.optimizer is None else state_bytes(self.optimizer),
            gathered_peak=self._executor.peak_gathered,
        )

    def memory(self) -> list[tuple[str, int | None, int]]:
        """This rank's bill: (category, predicted bytes, measured bytes) for each of `memory.CATEGORIES`."""
        pairs = zip(self.predicted_memory().rows(), self.measured_memory().rows(), strict=True)
        return [(category, predicted, measured or 0) for (category, predicted), (_, measured) in pairs]

    def train_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks; None when neither config nor loader says."""
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per rank and forward."""
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._batch.accumulation_steps

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)

    # ---- life cycle ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove all hooks and free all states; the module keeps its full weights. All ranks call it.

        The optimizer loses its state and its parameters; make a new one for the module. Idempotent.
        """
        if self._closed:
            return
        if self._executor.is_held:
            raise StateError("close() inside engine.gathered(): leave the block first")
        self._executor.end_step()
        self._executor.reduces.clear()
        self._closed = True
        for handle in self._handles:
            handle.remove()
        if self.optimizer is not None:
            self.optimizer.state.clear()
            for group in self.optimizer.param_groups:
                group["params"] = []
        self._executor.close()
        buffers = list(self._flat_buffers)
        self._flat_buffers, self._gradients = (), ()
        while buffers:  # one by one, so that weights are never held twice
            buffers.pop().release()
        self._groups.close()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise StateError(f"{what} after engine.close(); make a new engine with `initialize`")
