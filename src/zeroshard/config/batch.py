"""The three batch keys and the world size: total = micro batch size * accumulation steps * world."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from zeroshard.errors import ConfigError

__all__ = ["BatchPlan", "nearest_batches", "resolve_batch"]

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batch sizes of a run, in samples; train_batch_size = micro_batch_size * accumulation_steps * world.

    Two ranks, train_batch_size 32 and a micro batch of 4: 4 accumulation steps, since 4 * 4 * 2 = 32.
    """

    train_batch_size: int | None
    """Samples per optimizer step over all ranks. None: not known, and then micro_batch_size is None too."""
    micro_batch_size: int | None
    """Samples per rank and forward."""
    accumulation_steps: int
    """Micro-batches per optimizer step."""
    world: int
    """Data-parallel ranks."""
    derived: tuple[str, ...]
    """The config keys that were not given but follow from the others."""


def resolve_batch(
    train_batch_size: int | None,
    micro: int | None,
    gas: int | None,
    world: int,
    world_origin: str,
    *,
    source: str = "config",
    allow_unset: bool = False,
) -> BatchPlan:
    """Work out the batch keys that were not given.

    total and micro give the steps; total and steps give micro; micro and steps give the total; total alone is
    one step; micro alone is one step. All three must fit.

    Args:
        train_batch_size: the total, or None if not given; `micro` and `gas` (accumulation steps) likewise.
        world: number of data-parallel ranks.
        world_origin: where `world` came from, for the message: "WORLD_SIZE in the environment".
        source: where the keys came from (`config.source`), for the message.
        allow_unset: without total and micro, leave both None instead of raising; `gas` is then 1 by default.

    Raises:
        ConfigError: the values do not fit each other and the world, or too few are given. It names every
            value and its origin, and the nearest values that fit.
    """
    given = {TOTAL: train_batch_size, MICRO: micro, STEPS: gas}
    for name, value in {**given, "world size": world}.items():
        if value is not None and value < 1:
            origin = world_origin if name == "world size" else source
            raise ConfigError(f"{name} = {value} (from {origin}): must be at least 1; raise it")
    if train_batch_size is None and micro is None:
        if not allow_unset:
            raise ConfigError(
                f"{source}: neither {TOTAL} nor {MICRO} is given; one of them must be; "
                f"add {MICRO}, the samples of one forward on one rank"
            )
        return BatchPlan(
            train_batch_size=None,
            micro_batch_size=None,
            accumulation_steps=gas or 1,
            world=world,
            derived=() if gas is not None else (STEPS,),
        )
    total_, micro_, gas_ = _complete(train_batch_size, micro, gas, world)
    if total_ != micro_ * gas_ * world:
        _refuse(given, world, world_origin, source)
    derived = tuple(name for name, value in given.items() if value is None)
    return BatchPlan(
        train_batch_size=total_,
        micro_batch_size=micro_,
        accumulation_steps=gas_,
        world=world,
        derived=derived,
    )


def _complete(total: int | None, micro: int | None, gas: int | None, world: int) -> tuple[int, int, int]:
    """(total, micro, gas), by floor division; the caller checks the product."""
    if total is None:
        assert micro is not None
        gas = gas or 1
        return micro * gas * world, micro, gas
    if micro is None:
        gas = gas or 1
        return total, total // (gas * world), gas
    return total, micro, total // (micro * world) if gas is None else gas


def nearest_batches(
    total: int, micro: int | None, gas: int | None, world: int
) -> tuple[tuple[int, int, int], ...]:
    """Valid (total, micro, gas) near to what was asked for.

    The first keeps `micro` and `gas` where given and has the nearest total; the second, if `total` can be
    divided by `world`, keeps the total.

    >>> nearest_batches(30, 4, None, 2)
    ((32, 4, 4), (30, 5, 3))
    """
    unit = (micro or 1) * (gas or 1) * world
    # Of two equally near totals the larger: it uses the samples that were asked for.
    count = 1 if micro and gas else max(1, (2 * total + unit) // (2 * unit))
    first = (unit * count, micro or count, gas or (count if micro else 1))
    if total % world:
        return (first,)
    per_rank = total // world
    if micro and gas and per_rank % micro and per_rank % gas == 0:
        return first, (total, per_rank // gas, gas)
    if micro:
        fit = _nearest_divisor(per_rank, micro)
        return first, (total, fit, per_rank // fit)
    fit = _nearest_divisor(per_rank, gas or 1)
    return first, (total, per_rank // fit, fit)


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`; of two equally near ones the smaller."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    return min(divisors, key=lambda divisor: abs(divisor - wanted))


def _refuse(given: dict[str, int | None], world: int, world_origin: str, source: str) -> NoReturn:
    total, micro, gas = given[TOTAL], given[MICRO], given[STEPS]
    assert total is not None
    values = "".join(
        f"\n  {name} = {'not given (to be derived)' if value is None else f'{value} (from {source})'}"
        for name, value in given.items()
    )
    known = [part for part in (micro, gas, world) if part is not None]
    product = " * ".join(str(part) for part in known) + (f" = {math.prod(known)}" if len(known) > 1 else "")
    broken = f"{product}, not {total}" if micro and gas else f"{total} cannot be divided by {product}"
    cures = []
    for choice in nearest_batches(total, micro, gas, world):
        changes = [
            f"set {name} to {new}"
            for (name, old), new in zip(given.items(), choice, strict=True)
            if old is not None and old != new
        ]
        cures.append(f"{' and '.join(changes)} ({choice[1]} * {choice[2]} * {world} = {choice[0]})")
    if micro and gas and total % (micro * gas) == 0:
        ranks = total // (micro * gas)
        cures.append(f"start {ranks} ranks, which these three values fit (was the launcher used?)")
    raise ConfigError(
        f"{source}: the batch sizes do not fit{values}\n  world size = {world} (from {world_origin})\n"
        f"rule: {TOTAL} = {MICRO} * {STEPS} * world size, and {broken}\n"
        f"cure: {'; or '.join(cures)}"
    )
