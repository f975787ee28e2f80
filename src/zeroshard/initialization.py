"""`initialize`: from a model and a config to an engine."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from zeroshard.buffers import FlatBuffer
from zeroshard.comm import LocalCollectives, ballot, open_collectives, unanimous
from zeroshard.config import (
    AutoFacts,
    BatchPlan,
    Config,
    parse,
    require_supported,
    resolve_batch,
    torch_optimizer,
)
from zeroshard.data import TrainingLoader
from zeroshard.engine import Engine
from zeroshard.errors import ConfigError, ModelError
from zeroshard.executor import Executor
from zeroshard.gradients import GradientBuffer, slices_of
from zeroshard.guard import home_of
from zeroshard.hooks import install
from zeroshard.layout import Layout, plan_layout
from zeroshard.materialize import Description, Groups, build_buffer, build_gradients, describe, move_buffers
from zeroshard.optimizer import build_optimizer, check_elementwise, check_parameters, rewire
from zeroshard.policy import Policy
from zeroshard.precision import dtype_of
from zeroshard.streams import Lane
from zeroshard.world import World, join

__all__ = ["build_engine", "build_loader", "facts_of", "initialize", "open_groups", "policy_of"]

log = logging.getLogger("zeroshard")

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

OptimizerLike = Optimizer | Callable[[Any], Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Engine, Optimizer | None, TrainingLoader | None, Any]:
    """Make an engine that trains `model` with ZeRO as `config` says.

    Args:
        args: an object that may carry `deepspeed_config`, the path of a config.
        model: the module, built on any device; its parameters are taken over in place.
        optimizer: a torch optimizer over the model's parameters, or a callable that makes one from them;
            without it the config's `optimizer` section is used.
        model_parameters: what the config's optimizer trains; default all parameters that require grad.
        training_data: a dataset; a `data.TrainingLoader` that gives each rank its part is returned.
        lr_scheduler: a scheduler object, or a callable that makes one from the optimizer. Ticked at each
            update by `engine.step()`.
        collate_fn: for that loader.
        config: the DeepSpeed config: a dict, a path, or JSON text. `config_params` is its old name.

    Returns:
        `(engine, optimizer, loader, scheduler)`; the last three are None where there is none. The optimizer
        is the object that was handed in.

    All ranks call it with the same model and config. Raises ConfigError, ModelError or CommError.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"initialize needs model=, a torch.nn.Module; got {type(model).__name__}")
    raw = _one_config(args, config, config_params)
    world = join()
    parsed = parse(raw, facts=facts_of(model, optimizer, world))
    require_supported(parsed)
    if parsed.log_level is not None:
        _set_log_level(parsed.log_level)
    batch = resolve_batch(
        parsed.train_batch_size,
        parsed.train_micro_batch_size_per_gpu,
        parsed.gradient_accumulation_steps,
        world.size,
        world.size_origin,
        source=parsed.source,
        allow_unset=True,
    )
    if world.rank == 0 and parsed.notes:
        # A warning, so that it is seen without any logging set up: no key is ignored in silence.
        log.warning(
            "\n  ".join([f"{parsed.source}: keys without effect, or under an old name:", *parsed.notes])
        )
    policy = policy_of(parsed, batch, world.size)
    _check_same_on_all_ranks(model, policy, world)
    groups = open_groups(policy, world)
    engine = build_engine(
        model, parsed, batch, groups, world.device, optimizer, model_parameters, lr_scheduler
    )
    if world.rank == 0:
        log.info("predicted memory of a rank: %s", engine.predicted_memory())
    if training_data is not None:
        engine.training_dataloader = build_loader(training_data, collate_fn, parsed, batch, world)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def build_engine(
    model: nn.Module,
    config: Config,
    batch: BatchPlan,
    groups: Groups,
    device: torch.device,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
) -> Engine:
    """The engine over given collectives: what `initialize` does once it knows the world."""
    policy = policy_of(config, batch, groups.gather.size * groups.replicate.size)
    compute = None if policy.compute_dtype is None else dtype_of(policy.compute_dtype)
    _refuse_second_engine(model)
    made = _make_optimizer(model, config, optimizer, model_parameters)
    description = describe(model, compute, _leaf_test(config))
    layout = plan_layout(description.root, description.specs, policy)
    buffers, gradients = _build(description, layout, groups, policy, device)
    move_buffers(model, groups, device)
    if made is not None:
        _rewire(made, description, layout, buffers, gradients)
    executor = Executor(
        layout,
        policy,
        buffers,
        gradients,
        (groups.reduce, groups.replicate),
        warn_of_divergence=config.zero_optimization.log_trace_cache_warnings,
    )
    handles = install(description.modules, description.parameters, layout, executor, compute)
    scheduler = lr_scheduler(made) if _is_factory(lr_scheduler) else lr_scheduler
    return Engine(
        model,
        config=config,
        batch=batch,
        policy=policy,
        layout=layout,
        groups=groups,
        buffers=buffers,
        gradients=gradients,
        executor=executor,
        handles=handles,
        optimizer=made,
        scheduler=scheduler,
        device=device,
    )


def policy_of(config: Config, batch: BatchPlan, world: int) -> Policy:
    """The config's numbers as the planning functions take them."""
    zero = config.zero_optimization
    accumulate = config.data_types.grad_accum_dtype
    if accumulate is None and batch.accumulation_steps > 1:
        accumulate = "fp32"
    wire = config.communication_data_type
    return Policy.of_stage(
        zero.stage,
        world,
        compute_dtype="bfloat16" if config.bf16.enabled else None,
        reduce_dtype=None if wire is None else _DTYPES[wire],
        accumulate_dtype=None if accumulate is None else _DTYPES[accumulate],
        bucket_size=zero.reduce_bucket_size,
        persistence_threshold=zero.stage3_param_persistence_threshold,
        model_persistence_threshold=zero.stage3_model_persistence_threshold,
        max_live=zero.stage3_max_live_parameters,
        prefetch=zero.stage3_prefetch_bucket_size,
        max_reuse_distance=zero.stage3_max_reuse_distance,
    )


def facts_of(model: nn.Module, optimizer: OptimizerLike | None, world: World) -> AutoFacts:
    """What `"auto"` can be resolved from: the model's width, the optimizer, the world."""
    hidden = _hidden_size(getattr(model, "config", None))
    group = optimizer.param_groups[0] if isinstance(optimizer, Optimizer) else {}
    return AutoFacts(
        hidden_size=hidden,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        lr=group.get("lr"),
        betas=group.get("betas"),
        eps=group.get("eps"),
        weight_decay=group.get("weight_decay"),
        world=world.size,
    )


def _hidden_size(config: Any) -> int | None:
    """The width as Hugging Face configs tell it; of a composite model the largest."""
    sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or [])]
    for part in ("text_config", "vision_config"):
        sizes.append(getattr(getattr(config, part, None), "hidden_size", None))
    known = [size for size in sizes if isinstance(size, int)]
    return max(known, default=None)


def _set_log_level(level: str) -> None:
    """What the config asks to hear is heard, also where no logging is set up."""
    log.setLevel(level.upper())
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("zeroshard: %(message)s"))
        log.addHandler(handler)


def _one_config(args: Any, config: Any, config_params: Any) -> Any:
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1:
        raise ConfigError(
            f"initialize needs exactly one config, got {', '.join(named) or 'none'}; pass config=, a dict or the "
            f"path of a JSON file"
        )
    return next(iter(named.values()))


def _check_same_on_all_ranks(model: nn.Module, policy: Policy, world: World) -> None:
    """Ranks that disagree would hang, or mix up weights of equal size: compare before anything is shared."""
    if world.size == 1:
        return
    facts = {
        "zero_optimization and precision settings": repr(policy),
        "model's parameters (names, shapes, dtypes, requires_grad)": repr(
            [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
        ),
    }
    sums = torch.tensor(
        ballot(zlib.crc32(text.encode()) for text in facts.values()), dtype=torch.float64, device=world.device
    )
    dist.all_reduce(sums, group=world.group)
    for what, same in zip(facts, unanimous(sums.tolist(), world.size), strict=True):
        if not same:
            raise ModelError(
                f"ranks called `initialize` with different {what} (this is rank {world.rank}). Build the "
                f"same model from the same config on every rank."
            )


def open_groups(policy: Policy, world: World) -> Groups:
    """Gathers and reduces on groups of their own, so that neither waits for the other's order."""
    if policy.world == 1:
        return Groups(gather=LocalCollectives(), reduce=LocalCollectives(), replicate=LocalCollectives())
    if policy.shard_size == 1:
        group = dist.new_group()
        replicate = open_collectives(group, world.device)
        local = LocalCollectives()
        return Groups(gather=local, reduce=local, replicate=replicate, owned=(group,))
    groups = (dist.new_group(), dist.new_group())
    gather, reduce = (open_collectives(group, world.device) for group in groups)
    return Groups(gather=gather, reduce=reduce, replicate=LocalCollectives(), owned=groups)


def _refuse_second_engine(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if home_of(parameter) is not None:
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
        made = build_optimizer(choice.name, choice.kwargs, parameters)
    if made is not None:
        check_parameters(made, model)
        check_elementwise(made, config.zero_allow_untested_optimizer)
    return made


def _leaf_test(config: Config) -> Callable[[str, nn.Module], bool]:
    leaf = config.zero_optimization.leaf_module

    def is_leaf(path: str, module: nn.Module) -> bool:
        cls = type(module)
        return (
            cls.__name__ in leaf.classes
            or f"{cls.__module__}.{cls.__qualname__}" in leaf.classes
            or path in leaf.names
            or any(path.endswith(suffix) for suffix in leaf.name_suffixes)
        )

    return is_leaf


def _build(
    description: Description, layout: Layout, groups: Groups, policy: Policy, device: torch.device
) -> tuple[list[FlatBuffer], list[GradientBuffer | None]]:
    lane = Lane(device)
    buffers, gradients = [], []
    for bucket in layout.buckets:
        parameters = [description.parameters[slot.name] for slot in bucket.slots]
        buffers.append(build_buffer(bucket, parameters, groups, lane, device))
        gradients.append(build_gradients(bucket, groups, policy, device))
    return buffers, gradients


def _rewire(
    optimizer: Optimizer,
    description: Description,
    layout: Layout,
    buffers: list[FlatBuffer],
    gradients: list[GradientBuffer | None],
) -> None:
    slice_of, shape_of = {}, {}
    for buffer, gradient in zip(buffers, gradients, strict=True):
        pieces = buffer.layout.pieces(buffer.group.rank)
        owner = buffer.shard if buffer.master is None else buffer.master
        for piece, part in zip(pieces, slices_of(gradient, owner, pieces), strict=True):
            parameter = description.parameters[piece.slot.name]
            slice_of[id(parameter)] = part
            shape_of[id(parameter)] = piece.slot.spec.shape
    rewire(optimizer, slice_of, shape_of)


def _is_factory(scheduler: Any) -> bool:
    return callable(scheduler) and not hasattr(scheduler, "step")


def build_loader(
    dataset: Dataset[Any],
    collate_fn: Callable[[list[Any]], Any] | None,
    config: Config,
    batch: BatchPlan,
    world: World,
) -> TrainingLoader:
    """Each rank sees its part of the data, shuffled the same way on all ranks, each epoch in another way."""
    if batch.micro_batch_size is None:
        raise ConfigError(
            f"{config.source}: training_data needs a batch size; add train_micro_batch_size_per_gpu, the samples "
            f"of one forward on one rank"
        )
    return TrainingLoader(
        dataset,
        batch.micro_batch_size,
        world.rank,
        world.size,
        drop_last=config.dataloader_drop_last,
        collate_fn=collate_fn,
    )
