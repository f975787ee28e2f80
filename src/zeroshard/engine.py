"""The engine: a model that trains with its states sharded.

    engine(batch); engine.backward(loss); engine.step()             the managed loop
    loss.backward(); optimizer.step(); optimizer.zero_grad()        the plain loop, at every stage

Both end in the optimizer's own `step`: before it, reductions are finished, the norm is taken and gradients
are clipped; after it, the model's copy of the weights is refreshed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from zeroshard.access import Access
from zeroshard.boundary import Boundary, carried_tokens
from zeroshard.checkpoint.methods import Checkpoints
from zeroshard.checkpoint.saving import Saver
from zeroshard.compiling import Compiling
from zeroshard.config import BatchPlan, Config
from zeroshard.cut import Cuts
from zeroshard.data import TrainingLoader
from zeroshard.errors import ConfigError, NonFiniteError, StateError
from zeroshard.executor import Executor
from zeroshard.full_state import FullState, StateDicts
from zeroshard.inquiries import Inquiries
from zeroshard.optimizer import is_outermost_step
from zeroshard.policy import Policy
from zeroshard.progress import Progress
from zeroshard.states import States
from zeroshard.summary import summary
from zeroshard.update import StepResult, Update

__all__ = ["Engine", "StepResult"]


class Engine(Inquiries, StateDicts, Checkpoints, Compiling, nn.Module):
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
        states: States,
        update: Update,
        access: Access,
        full_state: FullState,
        boundary: Boundary,
        progress: Progress,
        handles: list[RemovableHandle],
        optimizer: Optimizer | None,
        scheduler: Any,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.module = module
        self._config, self.policy, self.device = config, policy, device
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self.training_dataloader: Any = None
        self.micro_steps = 0
        """Calls of `step`, boundary or not."""
        self.global_samples = 0
        """Samples of all optimizer steps so far, over all ranks."""
        self._batch = batch
        self._update, self._access, self._boundary, self._progress = update, access, boundary, progress
        self._states, self._executor, self._handles = states, states.executor, handles
        self._full_state = full_state
        self._forced: bool | None = None
        self._window = 0
        """Calls of `step` since the last update."""
        self._managed_backward = False
        self._sync = True
        self._closed = False
        self._saver = Saver()
        states.passes.on_backward = self._begin_backward
        self._executor.clock = self._executor.reduces.clock = progress.clock
        if optimizer is not None:
            handles.append(optimizer.register_step_pre_hook(self._before_optimizer))
            handles.append(optimizer.register_step_post_hook(self._after_optimizer))

    # ---- the loop -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; see `zeroshard.boundary` for what is done to inputs and outputs."""
        self._check_open("forward")
        if torch.is_grad_enabled():
            self._progress.saw_inputs((args, kwargs))
        try:
            return self.module(*args, **kwargs)
        except Exception as error:
            self._boundary.explain(error, self.module)
            raise
        except BaseException:
            # Ctrl-C, after which a notebook goes on: torch runs no hooks that could end what they began.
            self._executor.end_path()
            self._boundary.abandon()
            raise

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        tokens: float | None = None,
    ) -> Tensor:
        """Backward of a scalar loss, divided by the accumulation steps unless `scale_wrt_gas` is false.

        Gradients of the window add up to the mean over its micro-batches and over all ranks. With `tokens`
        (the tokens, or whatever else `loss` is a mean of, in this micro-batch on this rank) they are instead
        the mean over all tokens of the window on all ranks, however unequal the micro-batches are.

        Under fp16 the loss is also multiplied by the loss scale. Returns the loss without that, divided by
        the accumulation steps if it was.
        """
        self._check_open("backward")
        self._check_loss(loss)
        if tokens is not None and not 0 <= tokens < float("inf"):
            raise StateError(f"backward(tokens={tokens}): it must be a number of tokens, 0 or more")
        self._progress.saw_loss(loss)
        if tokens is None and scale_wrt_gas and self._batch.accumulation_steps > 1:
            loss = loss / self._batch.accumulation_steps
        self._managed_backward = True
        try:
            scaled = self._boundary.scaled(loss, tokens)
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self._managed_backward = False
        return loss.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, to call `.backward()` on; the loss itself when there is no scale.

        A plain `loss.backward()` is scaled too, where its gradient enters the model. This is for losses that
        reach weights around the model's outputs.
        """
        return self._boundary.scaled(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult | None:
        """End of a micro-batch. At the boundary: update the weights, drop gradients, tick the scheduler.

        Returns what the update did, None when this was not the boundary. The scheduler ticks once per applied
        step, with `lr_kwargs` (such as `{"metrics": loss}`).
        """
        self._check_open("step")
        if self.optimizer is None:
            raise StateError("step() needs an optimizer; give one to `initialize`, in the call or the config")
        self.micro_steps += 1
        if not self.is_gradient_accumulation_boundary():
            self._window += 1
            return None
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and "metrics" not in (lr_kwargs or {}):
            raise StateError(
                'ReduceLROnPlateau needs what it watches: engine.step({"metrics": value}), the same value on '
                "every rank"
            )
        self._update.requires_backward = True
        try:
            self.optimizer.step()
        finally:
            self._update.requires_backward = False
        result = self._update.last
        assert result is not None
        if self.lr_scheduler is not None and not result.skipped:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        return result

    def _report(self, result: StepResult) -> None:
        samples = self._batch.train_batch_size
        self.global_samples += samples or 0
        self._progress.stepped(
            step=self.global_steps,
            samples=self.global_samples if samples else self.global_steps,
            step_samples=samples,
            skipped=self.skipped_steps,
            rates=self.get_lr,
            result=result,
            scaled=self._boundary.loss_scale is not None,
        )
        if self.global_steps == 1:
            self._progress.tell_bill(self.memory())  # the measured column is what was missing before the run

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the window, reduced or not."""
        self._executor.reduces.clear()
        self._update.drop_window()
        for parameter in self.module.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the window's gradients to a global L2 norm now, and return what it was. All ranks call it.

        What `torch.nn.utils.clip_grad_norm_` does for a plain model; it finds no gradients here, since they are
        not left on the parameters. The step clips again by `gradient_clipping`, unless that is 0.
        """
        self._check_open("clip_grad_norm_")
        return self._update.clip(max_norm)

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

    coalesce_grad_reduction = no_sync

    def is_gradient_accumulation_boundary(self) -> bool:
        """The next `step()` updates the weights."""
        if self._forced is not None:
            return self._forced
        if not self._config.managed_gradient_accumulation:
            return True
        return self._window + 1 >= self._batch.accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand whether the next `step()` updates, until it is called again; None counts again.

        So a window that ends with the epoch is cut short: True before its last backward, None after the step.
        Each backward stays divided by the configured accumulation steps, as in a plain loop.
        """
        self._forced = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by changing the accumulation steps, from the next window on.

        Raises ConfigError when it is no multiple of micro-batch times ranks.
        """
        micro, world = self._batch.micro_batch_size, self._batch.world
        if micro is None:
            raise ConfigError("set_train_batch_size needs train_micro_batch_size_per_gpu in the config")
        if train_batch_size < 1 or train_batch_size % (micro * world):
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): must be a multiple of {micro * world}, which is "
                f"{micro} samples per forward on each of {world} ranks"
            )
        self._begin_new_batch(train_batch_size, micro, train_batch_size // (micro * world))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward, and with them those of a step; the accumulation steps stay."""
        if micro_batch_size < 1:
            raise ConfigError(f"set_train_micro_batch_size({micro_batch_size}): must be at least 1")
        steps = self._batch.accumulation_steps
        self._begin_new_batch(micro_batch_size * steps * self._batch.world, micro_batch_size, steps)

    def _begin_new_batch(self, total: int, micro: int, steps: int) -> None:
        if self._window or self._update.backwards:
            raise StateError(
                "the batch size can be changed between two windows, not within one: gradients of this window "
                "are already divided by its accumulation steps. Change it right after a step."
            )
        self._batch = replace(
            self._batch, train_batch_size=total, micro_batch_size=micro, accumulation_steps=steps
        )
        self._forced = None

    def _begin_backward(self) -> None:
        """Stages 0 and 1 reduce when a step is due after this backward; 2 and 3 every time."""
        self._update.saw_backward(carried_tokens())
        if not self._config.managed_gradient_accumulation:
            due = False  # nobody knows; the step reduces what is there
        elif self._managed_backward or self._forced is not None:
            due = self.is_gradient_accumulation_boundary()
        else:
            due = self._update.backwards % self._batch.accumulation_steps == 0
        self._executor.reduces.enabled = self._sync and (self.policy.reduce_every_backward or due)
        self._executor.reduces.averages = due

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not is_outermost_step(optimizer):
            return
        self._check_open("optimizer.step")
        if self._executor.is_held:
            raise StateError(
                "optimizer.step() inside engine.gathered(): the weights that the block shows would not be those "
                "that are trained. Leave the block before stepping."
            )
        if self._progress.clock is not None:
            self._progress.clock.start("optimizer")
        try:
            self._update.before(optimizer, args, kwargs)
        except NonFiniteError:
            self._end_window()  # the step was made, and skipped: who catches this goes on with the next one
            raise

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not is_outermost_step(optimizer):
            return
        self._update.after()
        self._end_window()

    def _end_window(self) -> None:
        self._window = 0
        if self._progress.clock is not None:
            self._progress.clock.stop("optimizer")
        assert self._update.last is not None
        self._report(self._update.last)

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
        with self._access.gathered(params, modifier_rank):
            yield

    @contextmanager
    def unwrap_for_generation(self) -> Iterator[nn.Module]:
        """The module with all its weights inside the block, gathered once: for `generate` and other long loops
        of forwards, which may then differ in length between ranks. All ranks enter and leave."""
        with self.gathered():
            yield self.module

    def full_fp32(self, parameter: nn.Parameter) -> Tensor:
        """A new tensor with the values the optimizer updates, in the parameter's shape. All ranks call it.

        Gradients and optimizer state: `zeroshard.safe_get_full_grad(parameter)` and its like.
        """
        return self._access.full_fp32(parameter)

    # ---- what happens -------------------------------------------------------------------------------

    @property
    def executor(self) -> Executor:
        """The running half, for observers (`on_action`) and measurements."""
        return self._executor

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)

    def announce(self) -> None:
        """Say what the run is going to do and to take: at level INFO, or printed with `dump_state`. Rank 0."""
        self._progress.tell(summary(self), self._config.dump_state)
        self._progress.tell_bill(self.memory())

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> TrainingLoader:
        """A loader of this rank's part of `dataset`: shuffled for the route "train", in order for others.

        `batch_size` is the samples of one forward on one rank, by default the config's. For a sampler of your
        own make a torch DataLoader. Raises ConfigError when the batch size is not known.
        """
        size = batch_size or self._batch.micro_batch_size
        if size is None or data_sampler is not None:
            raise ConfigError(
                f"{self._config.source}: training_data needs a batch size; add train_micro_batch_size_per_gpu, the "
                f"samples of one forward on one rank"
                if size is None
                else "deepspeed_io makes its own sampler; with data_sampler= build a torch.utils.data.DataLoader"
            )
        loader = TrainingLoader(
            dataset,
            size,
            self._states.rank,
            self._states.world,
            shuffle=route == "train",
            drop_last=self._config.dataloader_drop_last,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            pin_memory=pin_memory,
        )
        loader.clock = self._progress.clock
        return loader

    # ---- life cycle ---------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Engine:
        """The engine as it is, for code that moves models: `initialize` has placed it. StateError for another
        device or dtype than the weights have."""
        if self._closed:
            return super().to(*args, **kwargs)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        dtypes = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        stays = device is None or (
            device.type == self.device.type
            and (device.index == self.device.index or None in (device.index, self.device.index))
        )
        if stays and (dtype is None or dtypes <= {dtype}):
            return self
        held = ", ".join(sorted(map(str, dtypes)))
        raise StateError(
            f"engine.to({', '.join(str(part) for part in (device, dtype) if part is not None)}): its weights are "
            f"{held} on {self.device}, where `initialize` has placed them. Choose the dtype in the config (bf16, "
            f"fp16), and the device before `initialize`"
        )

    def allreduce_gradients(self) -> None:
        """Reduce now what backwards only accumulated so far; the step does it anyway. All ranks call it."""
        self._check_open("allreduce_gradients")
        self._executor.reduces.flush()

    def close(self, *, whole: bool = True) -> None:
        """Remove all hooks and free all states; the module keeps its full weights. All ranks call it.

        Without `whole`, what was sharded stays so, as if built under `zeroshard.Init`: the next `initialize` takes
        it from there. The optimizer loses its state and its parameters; make a new one for the module. Idempotent.
        """
        if self._closed:
            return
        if self._executor.is_held:
            raise StateError("close() inside engine.gathered(): leave the block first")
        self._saver.close()
        self._states.passes.end_step()
        self._update.conclude()
        self._executor.reduces.clear()
        self._closed = True
        for handle in self._handles:
            handle.remove()
        if self.optimizer is not None:
            self.optimizer.register_step_pre_hook(_refuse_step)
            self.optimizer.state.clear()
            for group in self.optimizer.param_groups:
                group["params"] = []
        self._states.passes.close()
        self._executor.close()
        buffers = list(self._states.buffers)
        self._states.close()
        self._update.close()
        self._progress.close()
        ranks = None if whole or self._states.world == 1 else dist.group.WORLD
        keep = None if ranks is None else Cuts.of(ranks, self.device).take
        while buffers:  # one by one, so that weights are never held twice
            buffers.pop().release(keep)
        self._states.groups.close()

    def destroy(self) -> None:
        """The end of the engine, and of all whole weights: `close(whole=False)`."""
        self.close(whole=False)

    def _check_loss(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor):
            raise StateError(f"backward wants a loss, a tensor of one element; got {type(loss).__name__}")
        if loss.numel() != 1:
            raise StateError(
                f"backward wants a loss of one element, got shape {tuple(loss.shape)}: average or sum it first. "
                f"For other outputs call `tensor.backward(gradient)`."
            )
        if not loss.requires_grad:
            raise StateError(
                f"backward got a loss that needs no gradient ({float(loss):g}, requires_grad=False): it was made "
                f"under torch.no_grad(), or detached, or every parameter it depends on is frozen"
            )

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise StateError(f"{what} after engine.close(); make a new engine with `initialize`")


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Stays on an optimizer whose engine is closed."""
    raise StateError("optimizer.step after engine.close(); make a new engine with `initialize`")
