"""Learning-rate schedules: the five of the DeepSpeed config, and torch's by name.

    schedule = build_schedule("WarmupLR", {"warmup_num_steps": 100}, optimizer)

A schedule is one of the `lr_curves` over t, applied to the rates of each parameter group. t is
`last_batch_iteration`: -1 when a schedule is built, one more at each `step()`. The classes keep the settings and
write the rates into the optimizer's groups.

Groups may differ. A rate given as a list has one value per group. A single number is the rate of the group with
the largest base lr, and the other groups keep their proportion to it: with base lrs 1e-3 and 1e-4, a
`warmup_max_lr` of 2e-3 warms the groups up to 2e-3 and 2e-4.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zeroshard.config.nearest import closest
from zeroshard.config.problems import Problem, shown
from zeroshard.config.scalars import boolean, integer, plain, real
from zeroshard.errors import ConfigError, StateError
from zeroshard.lr_curves import (
    CURVES,
    cycle_height,
    decay_intervals,
    range_test_factor,
    warmup_cosine_factor,
    warmup_decay_factor,
    warmup_factor,
)

__all__ = [
    "MOMENTUM_LIMIT",
    "SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_schedule",
]

log = logging.getLogger("zeroshard")

MOMENTUM_LIMIT = 0.9999
"""The largest momentum that OneCycle takes or grows to: at 1 an average takes in nothing new."""

_SECOND_BETA = 0.99  # DeepSpeed's, for as long as the first one is cycled

T = TypeVar("T")
Rate = float | Sequence[float]


class Schedule:
    """What the five schedules share: groups, base rates, `step`, state.

    A subclass defines `get_lr`. Its constructor calls this one, keeps its arguments as attributes of the same
    names (a rate as a list, one per group), and ends with `_start`.

    Args:
        optimizer: a torch optimizer, or an object whose `.optimizer` is one.
        last_batch_iteration: -1 starts the schedule and writes its first rates. Another value is a schedule to
            be continued: the optimizer is left as it is until the next step.

    Raises:
        TypeError: `optimizer` is neither.
        ConfigError: an argument has a value it cannot have.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = _torch_optimizer(optimizer)
        self.last_batch_iteration = _checked("last_batch_iteration", last_batch_iteration, integer(-1))
        groups = self.optimizer.param_groups
        _separate_tensors(groups)
        for group in groups:
            # torch's name for it. It is in the optimizer's state_dict, so that a schedule built over a restored
            # optimizer, or after another schedule, does not take a scheduled rate for the base.
            group.setdefault("initial_lr", float(group["lr"]))
        self.base_lrs: list[float] = [float(group["initial_lr"]) for group in groups]
        """One rate per group, from which the schedule starts, as in torch's schedules."""
        self._last_lr: list[float] = [float(group["lr"]) for group in groups]

    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates that were written last."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one step, or to the given one, and write the rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the saved schedule stopped; rates are written, the optimizer may not be restored."""
        self.step(state["last_batch_iteration"])

    def __repr__(self) -> str:
        names = list(inspect.signature(type(self).__init__).parameters)[2:]
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        rates = ", ".join(f"{rate:.4g}" for rate in self._last_lr)
        return f"{type(self).__name__}({settings}), lr {rates}"

    def _start(self) -> None:
        if self.last_batch_iteration == -1:
            self._write()

    def _write(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            raise StateError(
                f"{type(self).__name__} was built for {len(self.base_lrs)} parameter groups and the optimizer now "
                f"has {len(groups)}; build the schedule after the last add_param_group"
            )
        self._last_lr = self.get_lr()
        for group, rate in zip(groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # the tensor itself may be part of a captured graph
            else:
                group["lr"] = rate

    def _rates(self, key: str, value: Rate) -> list[float]:
        largest = max(self.base_lrs)
        shares = [base / largest if largest else 1.0 for base in self.base_lrs]
        return _per_group(key, value, shares, real(0))


class LRRangeTest(Schedule):
    """A rate that only grows, to find the largest one that still trains (arXiv 1506.01186)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.lr_range_test_min_lr = self._rates("lr_range_test_min_lr", lr_range_test_min_lr)
        self.lr_range_test_step_size = _checked(
            "lr_range_test_step_size", lr_range_test_step_size, integer(1)
        )
        self.lr_range_test_step_rate = _checked("lr_range_test_step_rate", lr_range_test_step_rate, real(0))
        self.lr_range_test_staircase = _checked("lr_range_test_staircase", lr_range_test_staircase, boolean)
        self._start()

    def get_lr(self) -> list[float]:
        factor = range_test_factor(
            self.last_batch_iteration,
            self.lr_range_test_step_size,
            self.lr_range_test_step_rate,
            self.lr_range_test_staircase,
        )
        return [low * factor for low in self.lr_range_test_min_lr]


class WarmupLR(Schedule):
    """From `warmup_min_lr` up to `warmup_max_lr` in `warmup_num_steps` steps, and level after that.

    `warmup_max_lr` None is each group's own base lr.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_min_lr = self._rates("warmup_min_lr", warmup_min_lr)
        self.warmup_max_lr = (
            list(self.base_lrs) if warmup_max_lr is None else self._rates("warmup_max_lr", warmup_max_lr)
        )
        self.warmup_num_steps = _checked("warmup_num_steps", warmup_num_steps, integer(0))
        self.warmup_type = _checked("warmup_type", warmup_type, _curve)
        self._start()

    def get_lr(self) -> list[float]:
        return _between(self.warmup_min_lr, self.warmup_max_lr, self._factor())

    def _factor(self) -> float:
        return warmup_factor(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then straight down to `warmup_min_lr` at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _checked("total_num_steps", total_num_steps, integer(1))
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )
        _warn_of_no_decay(self.total_num_steps, self.warmup_num_steps)

    def _factor(self) -> float:
        return warmup_decay_factor(
            self.last_batch_iteration, self.warmup_num_steps, self.total_num_steps, self.warmup_type
        )


class WarmupCosineLR(Schedule):
    """Fractions of each group's base lr: from `warmup_min_ratio` up to 1, then half a cosine wave down to
    `cos_min_ratio` (arXiv 1608.03983, without restarts)."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = _checked("total_num_steps", total_num_steps, integer(1))
        self.warmup_min_ratio = _checked("warmup_min_ratio", warmup_min_ratio, real(0))
        self.warmup_num_steps = _checked("warmup_num_steps", warmup_num_steps, integer(0))
        self.cos_min_ratio = _checked("cos_min_ratio", cos_min_ratio, real(0))
        self.warmup_type = _checked("warmup_type", warmup_type, _curve)
        self._start()
        _warn_of_no_decay(self.total_num_steps, self.warmup_num_steps)

    def get_lr(self) -> list[float]:
        factor = warmup_cosine_factor(
            self.last_batch_iteration,
            self.warmup_num_steps,
            self.total_num_steps,
            self.warmup_type,
            self.warmup_min_ratio,
            self.cos_min_ratio,
        )
        return [base * factor for base in self.base_lrs]


class OneCycle(Schedule):
    """One rise and fall between `cycle_min_lr` and `cycle_max_lr`, then a slow decay (arXiv 1803.09820).

    The momentum falls and rises against the rate: the first of `betas` (the second is then 0.99), or `momentum`
    where groups have that. After the cycle it grows, to `MOMENTUM_LIMIT` at most.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.cycle_min_lr = self._rates("cycle_min_lr", cycle_min_lr)
        self.cycle_max_lr = self._rates("cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = _checked("decay_lr_rate", decay_lr_rate, real(0))
        self.cycle_first_step_size = first = _checked(
            "cycle_first_step_size", cycle_first_step_size, integer(1)
        )
        self.cycle_first_stair_count = stairs = _checked(
            "cycle_first_stair_count", cycle_first_stair_count, integer(0)
        )
        second = first if cycle_second_step_size is None else cycle_second_step_size
        self.cycle_second_step_size = _checked("cycle_second_step_size", second, integer(0))
        second_stairs = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.cycle_second_stair_count = _checked("cycle_second_stair_count", second_stairs, integer(0))
        self.decay_step_size = _checked("decay_step_size", decay_step_size, integer(0))
        self.cycle_momentum = _checked("cycle_momentum", cycle_momentum, boolean)
        same, momentum = [1.0] * len(self.base_lrs), real(0, MOMENTUM_LIMIT)
        self.cycle_min_mom = _per_group("cycle_min_mom", cycle_min_mom, same, momentum)
        self.cycle_max_mom = _per_group("cycle_max_mom", cycle_max_mom, same, momentum)
        self.decay_mom_rate = _checked("decay_mom_rate", decay_mom_rate, real(0))
        groups = self.optimizer.param_groups
        if self.cycle_momentum and not any("betas" in group or "momentum" in group for group in groups):
            self.cycle_momentum = False
            log.warning(
                "scheduler.params.cycle_momentum: %s has neither betas nor momentum, so only the rate is cycled; "
                "set it to false",
                type(self.optimizer).__name__,
            )
        self._start()

    def get_lr(self) -> list[float]:
        height = self._height()
        decay = 1 + self.decay_lr_rate * self._intervals()
        return [
            low / decay + (high - low) * height
            for low, high in zip(self.cycle_min_lr, self.cycle_max_lr, strict=True)
        ]

    def get_momentum(self) -> list[float]:
        """The momentum (first beta) of each group at `last_batch_iteration`."""
        if self.last_batch_iteration < 0:
            return list(self.cycle_min_mom)  # as DeepSpeed: the first step, and it alone, has the lower one
        height = self._height()
        growth = 1 + self.decay_mom_rate * self._intervals()
        return [
            min(MOMENTUM_LIMIT, (high - (high - low) * height) * growth)
            for low, high in zip(self.cycle_min_mom, self.cycle_max_mom, strict=True)
        ]

    def _height(self) -> float:
        return cycle_height(
            self.last_batch_iteration,
            self.cycle_first_step_size,
            self.cycle_second_step_size,
            self.cycle_first_stair_count,
            self.cycle_second_stair_count,
        )

    def _intervals(self) -> float:
        cycle = self.cycle_first_step_size + self.cycle_second_step_size
        return decay_intervals(self.last_batch_iteration, cycle, self.decay_step_size)

    def _write(self) -> None:
        super()._write()
        if not self.cycle_momentum:
            return
        for group, momentum in zip(self.optimizer.param_groups, self.get_momentum(), strict=True):
            if "betas" in group:
                group["betas"] = (momentum, _SECOND_BETA)
            elif "momentum" in group:
                group["momentum"] = momentum


SCHEDULES: Mapping[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""The schedules of DeepSpeed's config, by their names there."""

_NOT_FROM_A_CONFIG = ("ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR")


def build_schedule(name: str, params: Mapping[str, Any], optimizer: Any) -> Schedule | LRScheduler:
    """The schedule that `scheduler.type` names: one of `SCHEDULES`, or a class of torch.optim.lr_scheduler.

    Args:
        name: exact name of the class.
        params: keyword arguments for it.
        optimizer: a torch optimizer, or an object whose `.optimizer` is one. Its rates are changed.

    Raises:
        ConfigError: there is no such class; `params` lacks one that the class needs, has one that it does not
            take, or a value that it cannot use.
        TypeError: `optimizer` is neither.
    """
    optimizer = _torch_optimizer(optimizer)
    if name in SCHEDULES:
        _check_names(name, SCHEDULES[name], params)
        return SCHEDULES[name](optimizer, **params)
    known = _torch_schedules()
    if name not in known:
        spellings = {spelling.lower(): spelling for spelling in (*SCHEDULES, *known)}
        near = closest(name.lower(), spellings)
        cure = f"did you mean {spellings[near]}?" if near else f"choose {', '.join(SCHEDULES)}"
        raise ConfigError(
            f"scheduler.type = {shown(name)}: neither a built-in name nor a class of torch.optim.lr_scheduler; "
            f"{cure}"
        )
    if name in _NOT_FROM_A_CONFIG:
        raise ConfigError(
            f"scheduler.type = {shown(name)}: it is made of functions or other schedules, which a config cannot "
            f"hold; pass lr_scheduler=lambda optimizer: {name}(...) to initialize"
        )
    _check_names(f"torch.optim.lr_scheduler.{name}", known[name], params)
    try:
        return known[name](optimizer, **plain(params))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"scheduler.params = {shown(plain(params))}: refused by torch.optim.lr_scheduler.{name}: {error}"
        ) from error


def _torch_schedules() -> dict[str, type[LRScheduler]]:
    return {
        name: cls
        for name, cls in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(cls) and issubclass(cls, LRScheduler) and cls is not LRScheduler
    }


def _check_names(shown_name: str, cls: type[Any], params: Mapping[str, Any]) -> None:
    accepted = dict(list(inspect.signature(cls.__init__).parameters.items())[2:])
    problems = []
    for name in params:
        if name not in accepted:
            near = closest(name, accepted)
            cure = f"; did you mean {near}?" if near else ""
            problems.append(f"scheduler.params.{name}: {shown_name} has no such parameter{cure}")
    for name, parameter in accepted.items():
        if parameter.default is parameter.empty and name not in params:
            problems.append(f"scheduler.params.{name}: {shown_name} needs it; add it")
    if problems:
        raise ConfigError(f"{'; '.join(problems)}. {shown_name} takes {', '.join(accepted)}")


def _torch_optimizer(given: Any) -> Optimizer:
    for found in (given, getattr(given, "optimizer", None)):
        if isinstance(found, Optimizer):
            return found
    raise TypeError(
        f"a schedule needs a torch.optim.Optimizer, or an object whose .optimizer is one, and was given "
        f"{type(given).__module__}.{type(given).__qualname__}; pass the optimizer"
    )


def _separate_tensors(groups: list[dict[str, Any]]) -> None:
    """An lr tensor that the optimizer was given once is in all its groups; each needs one of its own."""
    seen: set[int] = set()
    for group in groups:
        if isinstance(group["lr"], Tensor):
            if id(group["lr"]) in seen:
                group["lr"] = group["lr"].clone()
            seen.add(id(group["lr"]))


def _between(low: list[float], high: list[float], factor: float) -> list[float]:
    return [a + (b - a) * factor for a, b in zip(low, high, strict=True)]


def _per_group(key: str, value: Rate, shares: list[float], check: Callable[[Any], float]) -> list[float]:
    """A list as it is, one value per group; a single number times each of `shares`."""
    if not isinstance(value, (list, tuple)):
        number = _checked(key, value, check)
        return [number * share for share in shares]
    if len(value) != len(shares):
        raise ConfigError(
            f"scheduler.params.{key} = {shown(value)}: a list has one value per parameter group; it has "
            f"{len(value)} and the optimizer has {len(shares)} groups; write {len(shares)} values, or one number"
        )
    return [_checked(f"{key}[{place}]", item, check) for place, item in enumerate(value)]


def _checked(key: str, value: Any, check: Callable[[Any], T]) -> T:
    try:
        return check(value)
    except Problem as problem:
        raise ConfigError(
            f"scheduler.params.{key} = {shown(value)}: {problem.rule}; {problem.cure}"
        ) from None


def _curve(value: Any) -> str:
    if value not in CURVES:
        raise Problem(f"must be one of {' and '.join(CURVES)}", "write one of those")
    return str(value)


def _warn_of_no_decay(total: int, warmup: int) -> None:
    if total < warmup:
        log.warning(
            "scheduler.params.total_num_steps = %d is less than warmup_num_steps = %d: the rate rises for all of "
            "the warm-up, then falls to its end in one step; raise total_num_steps",
            total,
            warmup,
        )
