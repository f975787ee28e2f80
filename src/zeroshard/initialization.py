"""`initialize`: from a model and a config to an engine."""

from __future__ import annotations

import logging
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import Dataset

from zeroshard import checkpointing
from zeroshard.assembly import OptimizerLike, build_engine, policy_of
from zeroshard.comm import (
    Collectives,
    LocalCollectives,
    ballot,
    log_for,
    new_group,
    open_collectives,
    unanimous,
)
from zeroshard.config import AutoFacts, Config, parse, require_supported
from zeroshard.data import TrainingLoader
from zeroshard.engine import Engine
from zeroshard.errors import ConfigError, ModelError
from zeroshard.materialize import Groups, Ownership
from zeroshard.policy import Policy
from zeroshard.watching import timed
from zeroshard.world import World, join

__all__ = ["facts_of", "initialize", "open_groups"]

log = logging.getLogger("zeroshard")


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
    engine_class: type[Engine] = Engine,
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
        engine_class: what to make: `Engine`, or a class of your own that adds methods to it.

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
    batch = parsed.batch_on(world.size, world.size_origin)
    if world.rank == 0 and parsed.notes:
        # A warning, so that it is seen without any logging set up: no key is ignored in silence.
        log.warning(
            "\n  ".join([f"{parsed.source}: keys without effect, or under an old name:", *parsed.notes])
        )
    checkpointing.adopt(parsed)
    policy = policy_of(parsed, batch, world.size)
    _check_same_on_all_ranks(model, policy, world)
    groups = open_groups(policy, world)
    comms_log = log_for(parsed.comms_logger)
    if comms_log is not None:
        groups = timed(groups, comms_log)
    engine = build_engine(
        model, parsed, batch, groups, world.device, optimizer, model_parameters, lr_scheduler, engine_class
    )
    engine.announce()
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def facts_of(model: nn.Module, optimizer: OptimizerLike | None, world: World) -> AutoFacts:
    """What `"auto"` can be resolved from: the model's width, the optimizer, the world.

    Raises:
        ModelError: a parameter has no shape yet.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"parameter {name!r} is not initialised (a lazy module): run one forward before `initialize`."
            )
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
    """Gathers and reduces on groups of their own, so that neither waits for the other's order.

    Shard groups are consecutive ranks, and so are the groups of a secondary copy inside them; ranks of the same
    place in their shard groups are replicas of each other. All ranks make all groups, in the same order.
    """
    ended = _Ended.of(world)
    ranks, shard = list(range(world.size)), policy.shard_size
    ownership = Ownership()

    def opened(partition: list[list[int]]) -> Collectives:
        if len(partition[0]) == 1:
            return LocalCollectives()
        made = [new_group(world.device, members) for members in partition]
        own = next(group for group, members in zip(made, partition, strict=True) if world.rank in members)
        ownership.process_groups.append(own)
        return open_collectives(own, world.device)

    neighbours = _consecutive(ranks, shard)
    gather, reduce = opened(neighbours), opened(neighbours)
    replicate = opened([ranks[place::shard] for place in range(shard)])
    secondary = opened(_consecutive(ranks, policy.secondary_size)) if policy.secondary_size > 1 else None
    ended.watch(ownership)
    return Groups(gather=gather, reduce=reduce, replicate=replicate, secondary=secondary, ownership=ownership)


class _Ended:
    """Process groups of engines that nobody closed, and that are gone.

    A process group stays until it is destroyed, and ranks collect garbage at different times. So it is destroyed
    when the next engine is made and its own is gone on all ranks, by when nobody can be waiting in it.
    """

    _latest: ClassVar[_Ended | None] = None
    _WINDOW = 256
    """Of so many engines, the latest, it is kept who is gone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made = 0
        self._gone: dict[int, list[dist.ProcessGroup]] = {}
        """By number of the engine, the same on all ranks; empty lists of those that were closed."""

    @classmethod
    def of(cls, world: World) -> _Ended:
        """That of the default group there is now, after what is gone on all ranks was destroyed. A collective."""
        if cls._latest is None or cls._latest._world.group is not world.group:
            cls._latest = cls(world)
        elif world.size > 1:
            cls._latest._destroy()
        return cls._latest

    def watch(self, ownership: Ownership) -> None:
        self._made += 1
        finalizer = weakref.finalize(ownership, self._gone.__setitem__, self._made, ownership.process_groups)
        finalizer.atexit = False

    def _destroy(self) -> None:
        for number, owned in list(self._gone.items()):
            if not owned:
                del self._gone[number]
        # A copy first: garbage may be collected at any line, which adds entries.
        mine = [number for number in list(self._gone) if number > self._made - self._WINDOW]
        flags = torch.zeros(self._WINDOW, dtype=torch.float64, device=self._world.device)
        for number in mine:
            flags[number % self._WINDOW] = 1.0
        dist.all_reduce(flags, group=self._world.group)
        everywhere = (flags == self._world.size).tolist()
        for number in sorted(mine):
            if everywhere[number % self._WINDOW]:
                for group in self._gone.pop(number):
                    dist.destroy_process_group(group)


def _consecutive(ranks: list[int], size: int) -> list[list[int]]:
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]
