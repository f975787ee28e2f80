"""What users call to save and load an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.checkpoint.export import write_weights
from zeroshard.checkpoint.loading import CustomLoad, load
from zeroshard.checkpoint.together import together
from zeroshard.errors import StateError
from zeroshard.full_state import drop_frozen

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from zeroshard.checkpoint.saving import Saver
    from zeroshard.config import Config
    from zeroshard.executor import Executor
    from zeroshard.policy import Policy
    from zeroshard.states import States
    from zeroshard.update import Update

__all__ = ["Checkpoints"]


class Checkpoints:
    """A base of `Engine`."""

    module: nn.Module
    _config: Config
    policy: Policy
    device: torch.device
    optimizer: Optimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    micro_steps: int
    _window: int
    global_samples: int
    _states: States
    _executor: Executor
    _update: Update
    _saver: Saver
    _check_open: Callable[[str], None]
    full_state_dict: Callable[..., dict[str, Any]]
    gathered: Callable[..., AbstractContextManager[None]]

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything a run needs to go on as if it had not stopped. All ranks call it.

        Args:
            save_dir: a directory that all ranks see; checkpoints are directories in it.
            tag: the name of this one; `global_step<N>` if None. One of that name is replaced, in one step.
            client_state: tensors, numbers, text, paths, dates, members of enumerations, and lists, tuples and dicts
                of them: what `load_checkpoint` gives back, tensors on the CPU. Rank 0's counts.
            save_latest: what is opened when no tag is named is this one from here on.
            exclude_frozen_parameters: leave out what is not trained; the model that loads it has it already.

        Gradients that were accumulated and not applied yet are not saved: call it after a step. With
        `checkpoint.async` training goes on as soon as the state is copied to the host; an error of the writer is
        raised by the next save, or by `close`. Returns True. Raises CheckpointError, on all ranks, and then what
        `latest` names is as before.
        """
        self._check_free("save_checkpoint")
        name = None if tag is None else str(tag)
        self._saver.save(
            self, save_dir, name, client_state or {}, latest=save_latest, frozen=not exclude_frozen_parameters
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint, whatever the number of ranks and the stage that wrote it. All ranks call it.

        Args:
            load_dir: the directory that `save_checkpoint` was given, or one checkpoint in it.
            tag: which checkpoint; what `latest` names if None.
            load_module_strict: the checkpoint must have exactly this model's parameters and buffers; else what
                both have is loaded, and the rest is told.
            load_optimizer_states: the optimizer's state and its groups' options, such as lr.
            load_lr_scheduler_states: the scheduler's.
            load_module_only: only weights and buffers: no optimizer, scheduler, counters, random state, loader.
            custom_load_fn: called on every rank with the saved weights by name, whole and on the CPU, and the
                module, whole too, to put the ones into the other; rank 0's work counts. Both take memory.

        Returns `(path, client_state)`; `(None, {})`, with a warning, where there is no `latest` and no tag was
        given. Raises CheckpointError on all ranks when the checkpoint is damaged, incomplete or of another model.
        """
        self._check_free("load_checkpoint")
        name = None if tag is None else str(tag)
        return load(
            self,
            load_dir,
            name,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
            custom=custom_load_fn,
        )

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights, in the dtype the model computes in, to one file. All ranks call it; rank 0 writes.

        A name that ends in `.safetensors` is written as such, any other by `torch.save`; the file is replaced in
        one step. For files of a bounded size or another dtype, save a checkpoint and use `zeroshard export`.
        Returns True. Raises CheckpointError, on all ranks.
        """
        self._check_open("save_16bit_model")
        weights = self.full_state_dict()
        if exclude_frozen_parameters:
            drop_frozen(weights, self.module)

        def write() -> None:
            if self._states.rank == 0:
                write_weights(Path(save_dir) / save_filename, weights)

        together(self._states, "save_16bit_model", write)
        return True

    save_fp16_model = save_16bit_model

    def _check_free(self, what: str) -> None:
        self._check_open(what)
        if self._executor.is_held:
            raise StateError(
                f"{what}() inside engine.gathered(): edits made in the block are kept when it ends, and would not "
                f"be part of it. Leave the block first."
            )
