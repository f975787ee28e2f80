"""`deepspeed.initialize` and the engine it returns: zeroshard's, with the members that only DeepSpeed's has."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import zeroshard
from zeroshard.checkpoint.together import together
from zeroshard.compat.client_state import without_objects
from zeroshard.compat.comm import get_local_rank, get_world_size, init_distributed
from zeroshard.compat.messages import log_dist
from zeroshard.compat.parameters import mark, unmark
from zeroshard.config import read_config
from zeroshard.config.keys import value_at
from zeroshard.config.scalars import plain
from zeroshard.engine import Engine
from zeroshard.errors import NotYetError, StateError
from zeroshard.full_state import drop_frozen
from zeroshard.monitor import Monitor
from zeroshard.precision import DTYPES

__all__ = ["DeepSpeedEngine", "initialize"]


_engines: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def _let_go(model: nn.Module | None) -> None:
    """Close the engines of this very module: Lightning makes a new one for each of fit, validate, test and predict,
    and ends none of them."""
    for engine in [engine for engine in _engines if engine.module is model]:
        engine.close(whole=False)


class DeepSpeedEngine(Engine):
    """`zeroshard.Engine` as DeepSpeed's clients know it."""

    client_optimizer: Any = None
    client_lr_scheduler: Any = None
    mpu: Any = None
    loaded_checkpoint_dp_world_size: int | None = None
    loaded_checkpoint_mp_world_size: int | None = None
    enable_backward_allreduce = True
    gradient_average = True
    mp_world_size = sequence_parallel_size = 1

    def __init__(self, module: nn.Module, **parts: Any) -> None:
        super().__init__(module, **parts)
        self._given_config = self._config.raw
        self._full_state.parts_are_gathered = False  # PEFT asks parts for their names on rank 0 alone
        if self.optimizer is not None:
            # For clients that look there: Hugging Face holds its own scheduler back when a step was skipped.
            # What DeepSpeed's optimizer wraps, `optimizer.optimizer`, is the optimizer itself.
            vars(self.optimizer).update(_zeroshard_stage=self.policy.stage, optimizer=self.optimizer)
            if self.policy.stage >= 3:
                vars(self.optimizer)["parameter_offload"] = _ParameterOffload()
            self._tell_overflow(self.optimizer, overflow=False)
            self._handles.append(self.optimizer.register_step_post_hook(self._after_step))
        if self.policy.stage >= 3:
            mark(self.module.parameters())
        _engines.add(self)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._tell_overflow(optimizer, overflow=not self.was_step_applied())

    def _tell_overflow(self, optimizer: Optimizer, *, overflow: bool) -> None:
        scale = self.loss_scale()
        vars(optimizer).update(overflow=overflow, loss_scale=scale, cur_scale=scale)

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        """The config as it was given, a dict."""
        return self._given_config

    def close(self, *, whole: bool = True) -> None:
        """See `zeroshard.Engine.close`."""
        if self._closed:
            return  # the module may have another engine by now
        super().close(whole=whole)
        _engines.discard(self)
        unmark(self.module.parameters())

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise StateError(
                f"{what} of an engine that has ended: by close() or destroy(), or because `deepspeed.initialize` "
                f"made another engine of the same module, which is the one to use. transformers' Trainer destroys "
                f"the engine that it has when train() begins, and goes on with it: set trainer.model_wrapped = "
                f"trainer.model before train() if train() or evaluate() was called before"
            )

    # ---- who is who ---------------------------------------------------------------------------------

    @property
    def basic_optimizer(self) -> Optimizer | None:
        return self.optimizer

    @property
    def local_rank(self) -> int:
        return get_local_rank()

    @property
    def global_rank(self) -> int:
        return self._states.rank

    @property
    def world_size(self) -> int:
        return self._states.world

    dp_world_size = seq_dp_world_size = world_size

    @property
    def data_parallel_group(self) -> Any:
        return dist.group.WORLD

    seq_data_parallel_group = data_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self._states.rank

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_parallel_rank = get_sequence_parallel_rank = get_model_parallel_rank

    # ---- the loop -----------------------------------------------------------------------------------

    @property
    def _lightning(self) -> Any:
        """Lightning's Trainer that runs this engine, or None. A module keeps its Trainer when that is done."""
        trainer = getattr(self.module, "_trainer", None)
        return trainer if getattr(getattr(trainer, "strategy", None), "model", None) is self else None

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        tokens: float | None = None,
    ) -> Tensor:
        """See `zeroshard.Engine.backward`. Lightning's Trainer has divided the loss already, for every strategy."""
        divide = scale_wrt_gas and self._lightning is None
        return super().backward(loss, retain_graph, divide, tokens=tokens)

    def is_gradient_accumulation_boundary(self) -> bool:
        """See `zeroshard.Engine`; under Lightning's Trainer also the last batch of an epoch, as in its DDP.

        Its strategy steps after every batch and leaves counting to the engine, which cannot see epochs.
        """
        if super().is_gradient_accumulation_boundary():
            return True
        return self._forced is None and self._lightning is not None and bool(self._lightning.is_last_batch)

    def empty_partition_cache(self) -> None:
        """Free every weight that is gathered and not in use, and the allocator's cache."""
        self._executor.end_path()
        self._executor.drop_unclaimed()
        if self.device.type != "cpu":
            torch.get_device_module(self.device.type).empty_cache()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        raise NotYetError("engine.offload_states(): offload is planned and not there yet")

    reload_states = offload_states

    @property
    def monitor(self) -> Monitor:
        """What the config's monitors are written with: `write_events([(name, value, step), ...])`."""
        return self._progress.monitor

    # ---- checkpoints --------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """See `zeroshard.Engine.save_checkpoint`. Lightning's hyper-parameters are saved as far as they can be, and
        `zero_to_fp32.py` is put beside the checkpoint, which job scripts run."""
        state = without_objects(client_state, tells=self._states.rank == 0)
        saved = super().save_checkpoint(save_dir, tag, state, save_latest, exclude_frozen_parameters)

        def write() -> None:
            if self._states.rank == 0:
                (Path(save_dir) / "zero_to_fp32.py").write_text(_ZERO_TO_FP32)

        together(self._states, "save_checkpoint", write)
        return saved

    @functools.wraps(Engine.load_checkpoint)  # clients look at signatures
    def load_checkpoint(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See `zeroshard.Engine.load_checkpoint`; `(None, None)` where there is nothing to load."""
        path, state = super().load_checkpoint(*args, **kwargs)
        return path, None if path is None else state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        **_: Any,
    ) -> None:
        """Load `checkpoint["module"]` into the module. All ranks call it."""
        weights = checkpoint.get("module", checkpoint)
        if custom_load_fn is None:
            self.module.load_state_dict(weights, strict=strict)
            return
        with self.gathered(modifier_rank=0):
            custom_load_fn(src=weights, dst=self.module)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The whole state dict, on the CPU, on rank 0; empty elsewhere. All ranks call it.

        DeepSpeed has None elsewhere. accelerate's guide hands the answer to `save_pretrained` on every rank, and
        that asks the module for its state dict where it gets None: a call for all ranks, without rank 0.
        """
        state = self.full_state_dict()
        if exclude_frozen_parameters:
            drop_frozen(state, self.module)
        return state

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    # ---- settings -----------------------------------------------------------------------------------

    def optimizer_params(self) -> dict[str, Any]:
        params: dict[str, Any] = plain(self._config.optimizer.params)
        return params

    def scheduler_params(self) -> dict[str, Any]:
        params: dict[str, Any] = plain(self._config.scheduler.params)
        return params

    def zero_optimization_partition_gradients(self) -> bool:
        return self.policy.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.policy.stage >= 3

    def zero_use_cpu_optimizer(self) -> bool:
        return False

    zero_cpu_offload = zero_nvme_offload_optimizer = zero_partial_offload = zero_use_cpu_optimizer
    amp_enabled = elasticity_enabled = flops_profiler_enabled = autotuning_enabled = zero_use_cpu_optimizer
    random_ltd_enabled = curriculum_learning_enabled = data_efficiency_enabled = zero_use_cpu_optimizer

    def autotp_size(self) -> int:
        return 1

    def torch_autocast_dtype(self) -> torch.dtype | None:
        name = self._config.torch_autocast.dtype
        return None if name is None else DTYPES[name]

    @property
    def communication_data_type(self) -> torch.dtype | None:
        return DTYPES[self._config.reduce_dtype]

    def initial_dynamic_scale(self) -> float:
        return float(2**self._config.fp16.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        fp16 = self._config.fp16
        return {
            "init_scale": 2**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def __getattr__(self, name: str) -> Any:
        """DeepSpeed's getters of single keys: `zero_<key>()` and the names of `_SETTINGS`."""
        if name in _SETTINGS:
            return lambda: value_at(self._config, _SETTINGS[name])
        if name.startswith("zero_"):
            section, key = self._config.zero_optimization, name.removeprefix("zero_")
            for spelling in (key, f"stage3_{key}"):
                if spelling in type(section).model_fields:
                    return lambda: getattr(section, spelling)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _INSTEAD:
                raise
            raise AttributeError(f"engine.{name} of DeepSpeed is not here: {_INSTEAD[name]}") from None


_INSTEAD = {
    "checkpoint_engine": "save_checkpoint and load_checkpoint are; `checkpoint.async` writes in the background",
    "eval_batch": "it is PipelineEngine's; call engine(...) and engine.module.eval()",
    "get_wall_clock_timers": "set wall_clock_breakdown in the config, which prints them",
    "losses": "engine.backward returns the loss",
    "timers": "set wall_clock_breakdown in the config, or use torch.profiler",
    "train_batch": "it is PipelineEngine's; call engine(...), engine.backward(loss), engine.step()",
    "tput_timer": "steps_per_print in the config prints the throughput",
}
"""Attributes that scripts ask for, and what to do instead."""

_SETTINGS = {
    "aio_config": "aio",
    "checkpoint_tag_validation_enabled": "checkpoint.tag_validation",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "log_level": "log_level",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
}


_ZERO_TO_FP32 = '''#!/usr/bin/env python
"""Writes the weights of the checkpoint in this directory in fp32: python zero_to_fp32.py . output_dir"""

import sys

from zeroshard.compat.files import main

sys.exit(main())
'''


class _ParameterOffload:
    """Where TRL looks for DeepSpeed's hooks and their parameters, to take them off before it generates: none.

    It gathers all weights first, and while they are here the engine's own hooks do nothing.
    """

    def __init__(self) -> None:
        self.module = self
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    ds_external_parameters = named_parameters

    def _register_deepspeed_module(self, module: Any) -> None:
        """Nothing to do."""


def _without_idle_keys(given: Any, optimizer: Any) -> Any:
    """A config without what DeepSpeed passes over and clients write all the same.

    A schedule when there is nothing that it could drive: the config of a training run, used to evaluate (Trainer).
    Names with dots at the top level, such as "zero_optimization.reduce_bucket_size" (TRL).
    """
    if given is None:
        return given
    raw = read_config(given)
    idle = [name for name in raw.data if "." in name]
    if optimizer is None and "scheduler" in raw.data and not raw.data.get("optimizer"):
        idle.append("scheduler")
    if not idle:
        return given
    log_dist(f"keys of the config that have no effect here: {', '.join(idle)}", ranks=[0])
    return {name: value for name, value in raw.data.items() if name not in idle}


def _check_mpu(mpu: Any) -> None:
    """NotYetError unless all ranks are data parallel to each other."""
    sizes = {
        name: getattr(mpu, f"get_{name}_world_size", None)
        for name in (
            "model_parallel",
            "tensor_model_parallel",
            "pipe_parallel",
            "pipeline_model_parallel",
            "sequence_parallel",
        )
    }
    found = {name: ask() for name, ask in sizes.items() if ask is not None and ask() != 1}
    data = getattr(mpu, "get_data_parallel_world_size", get_world_size)()
    if found or data != get_world_size():
        told = ", ".join(f"{name} {size}" for name, size in {**found, "data_parallel": data}.items())
        raise NotYetError(
            f"mpu has {told}, of {get_world_size()} ranks: model parallelism is planned and not there yet; "
            f"gradients are averaged over all ranks. Leave mpu out"
        )


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[DeepSpeedEngine, Optimizer | None, Any, Any]:
    """`zeroshard.initialize` with DeepSpeed's arguments and engine.

    An engine that `model` has already is closed. `config` wins over `config_params` and `args.deepspeed_config`.
    `mpu` and `mesh_param` are for model parallelism, which is not there yet: only a size of 1 is accepted.
    """
    if mesh_param is not None and mesh_param[1] != 1:
        raise NotYetError(f"mesh_param={mesh_param}: sequence parallelism is planned and not there yet")
    if dist_init_required is not None or not dist.is_initialized():
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    _check_mpu(mpu)
    _let_go(model)
    given = _without_idle_keys(config if config is not None else config_params, optimizer)
    engine, made, loader, scheduler = zeroshard.initialize(
        None if given is not None else args,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        collate_fn=collate_fn,
        config=given,
        engine_class=DeepSpeedEngine,
    )
    assert isinstance(engine, DeepSpeedEngine)
    engine.client_optimizer, engine.client_lr_scheduler, engine.mpu = optimizer, lr_scheduler, mpu
    log_dist(
        f"DeepSpeed info: version={zeroshard.compat.VERSION}, zeroshard {zeroshard.__version__}", ranks=[0]
    )
    return engine, made, loader, scheduler
