"""Activation checkpointing under the names of `deepspeed.checkpointing`: recompute in backward, save memory.

    x = zeroshard.checkpointing.checkpoint(block, x)      # block's activations are made again in backward

It is torch's `checkpoint(..., use_reentrant=False)` with the settings of the config's section
`activation_checkpointing`, or of `configure`. It needs no engine. Sharded weights need nothing of it: torch's own
function, in both variants, and Hugging Face's `gradient_checkpointing_enable()` are gathered for just as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.config import Config, parse
from zeroshard.errors import ConfigError, NotYetError

__all__ = [
    "CudaRNGStatesTracker",
    "adopt",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

MODEL_PARALLEL = "model-parallel-rng"
"""The random numbers that differ between the ranks of a model-parallel group."""
MODEL_PARALLEL_OFFSET = 2718


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What `configure` was told; None is what the config says."""

    partition_activations: bool | None = None
    contiguous_memory_optimization: bool | None = None
    number_checkpoints: int | None = None
    cpu_checkpointing: bool | None = None
    synchronize_checkpoint_boundary: bool | None = None
    profile: bool | None = None

    def over(self, other: _Settings) -> _Settings:
        """These, and where they say nothing the `other` ones."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(other, **said)


_told = _Settings()
"""By arguments of `configure`, which win, whichever comes first."""
_of_config = _Settings()
_mpu: Any = None
_configured = False
_inside = 0
"""Functions of `checkpoint` that run now, one inside another."""


# ---- settings -------------------------------------------------------------------------------------------


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Settings of `checkpoint` from now on. `initialize` takes those of its config's section by itself.

    Args:
        mpu_: the model-parallel unit; only the seeds of `model_parallel_cuda_manual_seed` ask it.
        deepspeed_config: a config (dict, path, JSON text) whose section `activation_checkpointing` is used; the
            arguments below win over it.
        partition_activations: no effect without model-parallel ranks.
        contiguous_checkpointing: no effect: torch's allocator uses the memory of saved activations again.
        num_checkpoints: no effect: nothing is allocated ahead.
        checkpoint_in_cpu: keep the inputs of each checkpoint in (pinned) host memory until backward. On the CPU
            they are there anyway.
        synchronize: wait for the device where a checkpoint begins and ends, in forward and in recomputation.
        profile: rank 0 prints the milliseconds of each checkpoint's forward and recomputation.

    Raises ConfigError for settings that need one another.
    """
    global _mpu, _told, _of_config, _configured
    of_config = _of_config if deepspeed_config is None else _section(parse(deepspeed_config))
    told = _Settings(
        partition_activations=partition_activations,
        contiguous_memory_optimization=contiguous_checkpointing,
        number_checkpoints=num_checkpoints,
        cpu_checkpointing=checkpoint_in_cpu,
        synchronize_checkpoint_boundary=synchronize,
        profile=profile,
    ).over(_told)
    mpu = mpu_ if mpu_ is not None else _mpu
    _check(told.over(of_config), mpu)
    _told, _of_config, _mpu, _configured = told, of_config, mpu, True


def adopt(config: Config) -> None:
    """What `initialize` does with the section `activation_checkpointing`, when the config has one."""
    global _of_config, _configured
    if "activation_checkpointing" in config.model_fields_set:
        _of_config, _configured = _section(config), True


def is_configured() -> bool:
    """`configure` was called, or `initialize` with a section `activation_checkpointing`."""
    return _configured


def reset() -> None:
    """Nothing to do: there are no buffers that evaluation would have to clear."""


def set_num_layers(nlayers: int) -> None:
    """As `configure(num_checkpoints=nlayers)`: no effect."""
    configure(num_checkpoints=nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """As `configure(partition_activations=...)`."""
    configure(partition_activations=partition_activation)


def _section(config: Config) -> _Settings:
    section = config.activation_checkpointing
    return _Settings(**{field.name: getattr(section, field.name) for field in fields(_Settings)})


def _check(settings: _Settings, mpu: Any) -> None:
    if settings.contiguous_memory_optimization and not settings.partition_activations:
        raise ConfigError(
            "contiguous_checkpointing (contiguous_memory_optimization) = true: it packs what "
            "partition_activations cuts, and that is off. Both have no effect here: remove contiguous_checkpointing"
        )
    if settings.contiguous_memory_optimization and not settings.number_checkpoints:
        raise ConfigError(
            "contiguous_checkpointing (contiguous_memory_optimization) = true needs num_checkpoints "
            "(number_checkpoints), which is not given. Both have no effect here: remove contiguous_checkpointing"
        )
    size = _ask(mpu, "world_size", alone=1)
    if settings.partition_activations and size > 1:
        raise NotYetError(
            f"partition_activations = true with {size} model-parallel ranks (of the mpu): not yet (tensor "
            f"parallelism); set partition_activations to false"
        )


def _ask(mpu: Any, what: str, alone: int) -> int:
    """`what` (rank or world_size) of the model-parallel group; `alone` where there is none."""
    for name in (f"get_tensor_model_parallel_{what}", f"get_model_parallel_{what}"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return alone


# ---- checkpoints ----------------------------------------------------------------------------------------


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are not kept but made again in backward.

    Arguments may be anything; tensors among them, also inside lists, tuples and dicts, are what is saved. The
    result is what `function` returns. No input needs to require grad. Random numbers are the same again, also
    those of the tracker.
    """
    global _inside
    if torch.compiler.is_compiling():  # dynamo knows torch's function
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    settings = _told.over(_of_config)
    leaves, spec = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        global _inside
        _inside += 1
        try:
            inner, named = tree_unflatten(leaves, spec)
            return function(*inner, **named)
        finally:
            _inside -= 1

    watch = _Watch(function, settings)
    with ExitStack() as stack:
        # What a checkpoint inside another one saves is dropped, and made again, with all the rest.
        if settings.cpu_checkpointing and not _inside:
            stack.enter_context(save_on_cpu(pin_memory=torch.accelerator.is_available()))
        return torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False, context_fn=watch.contexts)


non_reentrant_checkpoint = checkpoint


class _Watch:
    """Around one checkpoint's function: in forward, and again in its recomputation."""

    def __init__(self, function: Callable[..., Any], settings: _Settings) -> None:
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._settings = settings
        self._states: Mapping[str, torch.Tensor] = {}

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What torch's checkpoint enters in forward, and in recomputation."""
        self._states = _tracker.get_states()
        return self._measured("forward"), self._again()

    @contextmanager
    def _again(self) -> Iterator[None]:
        now = _tracker.get_states()
        _tracker.set_states(self._states)
        try:
            with self._measured("recomputation"):
                yield
        finally:
            _tracker.set_states(now)

    @contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        self._synchronize()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            if self._settings.profile and not (dist.is_initialized() and dist.get_rank()):
                spent = 1e3 * (time.perf_counter() - began)
                print(f"checkpoint {self._name}: {phase} {spent:.2f} ms", flush=True)

    def _synchronize(self) -> None:
        wanted = self._settings.profile or self._settings.synchronize_checkpoint_boundary
        if wanted and torch.accelerator.is_available():
            torch.accelerator.synchronize()


# ---- random numbers of model parallelism ----------------------------------------------------------------


class CudaRNGStatesTracker:
    """Random states by name, of the accelerator where there is one, else of the CPU."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state `name` that starts from `seed`. ValueError for a name or a seed that is there already."""
        if name in self._states:
            raise ValueError(f"random state {name!r} exists already; reset() forgets all of them")
        if seed in self._seeds:
            raise ValueError(
                f"seed {seed} is used by another random state, which would give the same numbers"
            )
        generator, before = _generator(), _generator().get_rng_state()
        generator.manual_seed(seed)
        self._states[name] = generator.get_rng_state()
        self._seeds.add(seed)
        generator.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Random numbers inside are those of state `name`, which goes on from there. ValueError without it."""
        if name not in self._states:
            raise ValueError(
                f"there is no random state {name!r}; known are {', '.join(self._states) or 'none'}"
            )
        generator, before = _generator(), _generator().get_rng_state()
        generator.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.get_rng_state()
            generator.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker whose states recomputation restores."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device with `seed`, and the tracker's model-parallel state with one that differs by rank of the
    model-parallel group (of the mpu given to `configure`; rank 0 without one)."""
    _tracker.reset()
    _generator().manual_seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + MODEL_PARALLEL_OFFSET + _ask(_mpu, "rank", alone=0))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracker's model-parallel state anew, and leave all others alone."""
    with _tracker.fork():
        _generator().manual_seed(seed + MODEL_PARALLEL_OFFSET + _ask(_mpu, "rank", alone=0))


def _generator() -> Any:
    """Where the default random numbers of this process's device are seeded, saved and restored."""
    return torch.get_device_module() if torch.accelerator.is_available() else torch.random
