"""From a model, a parsed config and collectives to an engine: every part made once, and joined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.access import Access
from zeroshard.boundary import Boundary
from zeroshard.buffers import FlatBuffer
from zeroshard.clock import Clock
from zeroshard.config import BatchPlan, Config, torch_optimizer
from zeroshard.config.zero import LeafModule
from zeroshard.cut import trim_heap
from zeroshard.engine import Engine
from zeroshard.errors import ConfigError, ModelError
from zeroshard.executor import Executor
from zeroshard.finite import FiniteProbe
from zeroshard.full_state import FullState
from zeroshard.gradients import GradientBuffer, ShardSlice, slices_of
from zeroshard.guard import LEAF_MARK, has_engine
from zeroshard.hooks import install
from zeroshard.layout import Layout, ModuleSpec, plan_layout
from zeroshard.leaves import leaves_by_granularity, unmatched_leaves
from zeroshard.loss_scale import LossScale
from zeroshard.lr_schedules import build_schedule
from zeroshard.materialize import Description, Groups, build_buffer, describe, make_trainable, move_buffers
from zeroshard.mixed_precision import Precision
from zeroshard.monitor import Monitor
from zeroshard.optimizer import build_optimizer, check_parameters, rewire, uncut_parameters
from zeroshard.passes import Passes
from zeroshard.policy import Policy
from zeroshard.precision import DTYPES, dtype_name
from zeroshard.progress import Progress
from zeroshard.states import States
from zeroshard.streams import Lane
from zeroshard.tiles import Tiles
from zeroshard.trainables import Trainables
from zeroshard.update import Update
from zeroshard.watching import groups_for, tell_about

log = logging.getLogger("zeroshard")

__all__ = ["OptimizerLike", "build_engine", "loss_scale_of", "policy_of"]

OptimizerLike = Optimizer | Callable[[Any], Optimizer]


def build_engine(
    model: nn.Module,
    config: Config,
    batch: BatchPlan,
    groups: Groups,
    device: torch.device,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    engine_class: type[Engine] = Engine,
) -> Engine:
    """The engine over given collectives: what `initialize` does once it knows the world."""
    policy = policy_of(config, batch, groups.gather.size * groups.replicate.size)
    precision = Precision.of(config)
    _refuse_second_engine(model)
    made = _make_optimizer(model, config, optimizer, model_parameters)
    scheduler = _make_scheduler(made, config, lr_scheduler)
    uncut = uncut_parameters(made, policy.shard_size, config.zero_allow_untested_optimizer)
    precision.check_kept(model)
    kept = dict.fromkeys(precision.kept_calls(model), precision.compute or torch.float32)
    description = describe(model, precision.parameter_dtypes(model), _leaf_test(config), uncut)
    root = _with_leaves(description, config, is_first=_is_first(groups))
    _tell_vain_second_shards(config, policy, is_first=_is_first(groups))
    layout = plan_layout(root, description.specs, policy)
    buffers, gradients = _build(description, layout, groups, policy, device)
    tell_about(model, layout, groups)
    precision.cast_buffers(model)
    move_buffers(model, groups, device)
    slices = _slices(layout, buffers, gradients, made is not None)
    if made is not None:
        _rewire(made, description, layout, slices)
    executor = Executor(
        layout,
        policy,
        buffers,
        gradients,
        (groups.reduce, groups.replicate),
        warn_of_divergence=config.zero_optimization.log_trace_cache_warnings,
    )
    loss_scale = loss_scale_of(config, precision)
    boundary = Boundary(
        device=device,
        compute=precision.compute,
        autocast=precision.autocast,
        loss_scale=loss_scale if precision.needs_loss_scale else None,
    )
    passes = Passes(executor)
    handles = install(description.modules, layout, passes, boundary, kept)
    states = States(
        buffers=buffers,
        gradients=gradients,
        slices=slices,
        executor=executor,
        passes=passes,
        groups=groups,
        device=device,
    )
    update = _make_update(config, precision, loss_scale, model, states, Tiles(policy.tile))
    trainables = Trainables(model, description.parameters, states, policy, update, boundary)
    full_state = FullState(states)
    return engine_class(
        model,
        config=config,
        batch=batch,
        policy=policy,
        states=states,
        update=update,
        access=Access(states, made),
        full_state=full_state,
        boundary=boundary,
        progress=_make_progress(config, layout.numel, states),
        handles=[*trainables.install(), *handles, *full_state.install(model)],
        optimizer=made,
        scheduler=scheduler,
        device=device,
    )


def _make_update(
    config: Config,
    precision: Precision,
    loss_scale: LossScale,
    model: nn.Module,
    states: States,
    tiles: Tiles,
) -> Update:
    """When the norm is needed, and what happens with one that is not finite."""
    checks = precision.needs_loss_scale or (config.bf16.enabled and config.bf16.check_grad_overflow)
    return Update(
        states,
        clipping=config.gradient_clipping,
        needs_norm=checks or config.gradient_clipping > 0 or config.zero_optimization.compute_grad_norm,
        skips=checks or not config.bf16.enabled,
        tolerates_unused=config.zero_optimization.ignore_unused_parameters,
        loss_scale=loss_scale,
        probe=FiniteProbe(model),
        names=[name for name, _ in model.named_parameters()],
        tiles=tiles,
    )


def _make_progress(config: Config, parameters: int, states: States) -> Progress:
    """With monitors that rank 0 writes; when it cannot start them, all ranks stop."""
    monitor: Monitor | None = None
    problem: Exception | None = None
    try:
        monitor = Monitor.of(config, states.rank)
    except Exception as error:  # whatever a package raises: the other ranks wait for the answer
        problem = error
    if config.tensorboard.enabled or config.csv_monitor.enabled or config.wandb.enabled:
        failures = states.sum([float(problem is not None)])[0]
        if failures and problem is None:
            problem = ConfigError("rank 0 could not start the monitors of the config; its message says why")
    if monitor is None or problem is not None:
        assert problem is not None
        raise problem
    return Progress(
        config,
        rank=states.rank,
        world=states.world,
        device=states.device,
        parameters=parameters,
        clock=Clock(states.device) if config.wall_clock_breakdown else None,
        monitor=monitor,
    )


def policy_of(config: Config, batch: BatchPlan, world: int) -> Policy:
    """The config's numbers as the planning functions take them."""
    zero = config.zero_optimization
    accumulate = config.data_types.grad_accum_dtype
    wide = not config.bf16.bf16_master_weights_and_grads
    if accumulate is None and batch.accumulation_steps > 1:
        accumulate = "fp32" if wide else "bf16"
    wire = config.communication_data_type
    divisor = float(world) if config.prescale_gradients else config.gradient_predivide_factor
    return Policy.of_stage(
        zero.stage,
        world,
        mics=zero.mics_shard_size,
        hpz=zero.zero_hpz_partition_size,
        reduce_dtype=None if wire is None else dtype_name(DTYPES[wire]),
        accumulate_dtype=None if accumulate is None else dtype_name(DTYPES[accumulate]),
        before_reduce=1.0 / divisor,
        after_reduce=divisor * (world if config.gradient_allreduce_op == "sum" else 1),
        wide_masters=wide,
        bucket_size=zero.reduce_bucket_size,
        persistence_threshold=zero.stage3_param_persistence_threshold,
        model_persistence_threshold=zero.stage3_model_persistence_threshold,
        max_live=zero.stage3_max_live_parameters,
        prefetch=zero.stage3_prefetch_bucket_size,
        max_reuse_distance=zero.stage3_max_reuse_distance,
        tile=zero.sub_group_size,
    )


def loss_scale_of(config: Config, precision: Precision) -> LossScale:
    """Of fp16, from the `fp16` section; 1, and never another, for what needs none."""
    fp16 = config.fp16
    if not precision.needs_loss_scale:
        return LossScale(1.0)
    if fp16.loss_scale > 0:
        return LossScale(fp16.loss_scale)
    return LossScale(
        2.0**fp16.initial_scale_power,
        dynamic=True,
        window=fp16.loss_scale_window,
        minimum=fp16.min_loss_scale,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
    )


def _refuse_second_engine(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if has_engine(parameter):
            raise ModelError(
                f"parameter {name!r} already belongs to an engine. Call close() on that engine first, or share "
                f"one engine."
            )


def _make_optimizer(
    model: nn.Module, config: Config, optimizer: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> Optimizer | None:
    """The optimizer over whole parameters: the user's, or the config's; None trains nothing."""
    parameters = list(model_parameters) if model_parameters is not None else None
    if not parameters:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(optimizer, Optimizer):
        made: Optimizer | None = optimizer
    elif optimizer is not None:
        made = optimizer(parameters)
    else:
        choice = torch_optimizer(config.optimizer)
        if choice is None or not parameters:
            return None
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        made = build_optimizer(choice.name, choice.kwargs, parameters, name_of)
    if made is not None:
        check_parameters(made, model)
    return made


def _leaf_test(config: Config) -> Callable[[str, nn.Module], bool]:
    leaf = config.zero_optimization.leaf_module

    def is_leaf(path: str, module: nn.Module) -> bool:
        cls = type(module)
        said = getattr(module, LEAF_MARK, None)
        if said is not None:
            return bool(said)
        return (
            cls.__name__ in leaf.classes
            or f"{cls.__module__}.{cls.__qualname__}" in leaf.classes
            or path in leaf.names
            or any(path.endswith(suffix) for suffix in leaf.name_suffixes)
        )

    return is_leaf


def _with_leaves(description: Description, config: Config, *, is_first: bool) -> ModuleSpec:
    """The module tree with the leaves that the config finds by granularity; what it looks for in vain is told."""
    zero, root = config.zero_optimization, description.root
    leaf, usual = zero.leaf_module, LeafModule()
    missing = unmatched_leaves(
        root, [entry for entry in leaf.classes if entry not in usual.classes], leaf.names, leaf.name_suffixes
    )
    if missing and is_first:
        log.warning("no module of the model matches leaf_module.%s", ", leaf_module.".join(missing))
    threshold = zero.stage3_module_granularity_threshold
    if not threshold or zero.stage < 3:
        return root
    numel = {spec.name: spec.numel for spec in description.specs}
    marked, finest = leaves_by_granularity(root, numel, threshold)
    if finest is not None and is_first:
        log.warning(
            "stage3_module_granularity_threshold %d makes no module a leaf: the finest is %r with %d elements per "
            "module; a threshold from that on has an effect",
            threshold,
            *finest,
        )
    return marked


def _is_first(groups: Groups) -> bool:
    return groups.gather.rank == groups.replicate.rank == 0


def _tell_vain_second_shards(config: Config, policy: Policy, *, is_first: bool) -> None:
    asked = config.zero_optimization.zero_hpz_partition_size
    if is_first and policy.stage >= 3 and asked > 1 and policy.secondary_size == 1:
        log.warning(
            "zero_optimization.zero_hpz_partition_size = %d has no effect here: states are sharded over %d %s, and "
            "second shards need a smaller group of ranks",
            asked,
            policy.shard_size,
            "rank" if policy.shard_size == 1 else "ranks",
        )


def _build(
    description: Description, layout: Layout, groups: Groups, policy: Policy, device: torch.device
) -> tuple[list[FlatBuffer], list[GradientBuffer | None]]:
    lane = Lane(device)
    buffers, gradients = [], []
    for bucket in layout.buckets:
        parameters = [description.parameters[slot.name] for slot in bucket.slots]
        named = groups_for(bucket, groups)
        buffer = build_buffer(bucket, parameters, named, policy, lane, device)
        buffers.append(buffer)
        gradients.append(make_trainable(buffer, named, policy) if bucket.trainable else None)
    trim_heap()  # of the weights as they were handed over
    return buffers, gradients


def _slices(
    layout: Layout,
    buffers: Sequence[FlatBuffer],
    gradients: Sequence[GradientBuffer | None],
    trains: bool,
) -> list[tuple[ShardSlice, ...]]:
    """Per bucket and slot: what the optimizer is to hold; nothing when there is none."""
    if not trains:
        return [() for _ in buffers]
    return [
        slices_of(
            gradient,
            buffer.shard if buffer.master is None else buffer.master,
            bucket.pieces(buffer.group.rank),
        )
        for bucket, buffer, gradient in zip(layout.buckets, buffers, gradients, strict=True)
    ]


def _rewire(
    optimizer: Optimizer, description: Description, layout: Layout, slices: Sequence[Sequence[ShardSlice]]
) -> None:
    slice_of, shape_of = {}, {}
    for bucket, parts in zip(layout.buckets, slices, strict=True):
        for slot, part in zip(bucket.slots, parts, strict=True):
            parameter = description.parameters[slot.name]
            slice_of[id(parameter)] = part
            shape_of[id(parameter)] = slot.spec.shape
    rewire(optimizer, slice_of, shape_of)


def _make_scheduler(optimizer: Optimizer | None, config: Config, lr_scheduler: Any) -> Any:
    """The user's scheduler, or the config's; None where there is neither."""
    chosen = lr_scheduler if lr_scheduler is not None else config.scheduler.type
    if chosen is None:
        return None
    if optimizer is None:
        raise ConfigError(
            f"a learning-rate schedule ({chosen if isinstance(chosen, str) else type(chosen).__name__}) needs an "
            f"optimizer, and there is none: pass optimizer= to initialize, or add an optimizer section to "
            f"{config.source}"
        )
    if lr_scheduler is None:
        return build_schedule(chosen, config.scheduler.params, optimizer)
    if _is_factory(lr_scheduler):
        return lr_scheduler(optimizer)
    if getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
        raise ModelError(
            f"the {type(lr_scheduler).__name__} that was passed drives another optimizer than the one that trains "
            f"({type(optimizer).__name__}). Build it on the optimizer that is passed to initialize, or pass "
            f"lr_scheduler=lambda optimizer: ... to have it built"
        )
    return lr_scheduler


def _is_factory(scheduler: Any) -> bool:
    return callable(scheduler) and not hasattr(scheduler, "step")
