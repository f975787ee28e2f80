"""The three batch keys and the world size: total = micro batch size * accumulation steps * world."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from zeroshard.errors import ConfigError

__all__ = ["BatchPlan", "nearest_batch", "resolve_batch"]

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
    if min(total_, micro_, gas_) < 1 or total_ != micro_ * gas_ * world:
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


def nearest_batch(total: int, micro: int | None, gas: int | None, world: int) -> tuple[int, int, int]:
    """The valid (total, micro, gas) nearest to `total`; `micro` and `gas` are kept where given.

    >>> nearest_batch(30, 4, None, 2)
    (32, 4, 4)
    """
    unit = (micro or 1) * (gas or 1) * world
    if micro is not None and gas is not None:
        return unit, micro, gas
    # Of two equally near totals the larger: it uses the samples that were asked for.
    count = max(1, math.floor(total / unit + 0.5))
    return (
        unit * count,
        micro or (count if gas is not None or micro is None else 1),
        gas or (count if micro is not None else 1),
    )


def _refuse(given: dict[str, int | None], world: int, world_origin: str, source: str) -> NoReturn:
    total, micro, gas = given[TOTAL], given[MICRO], given[STEPS]
    assert total is not None
    lines = "".join(
        f"\n  {name} = {'not given (to be derived)' if value is None else f'{value} (from {source})'}"
        for name, value in given.items()
    )
    product = (micro or 1) * (gas or 1) * world
    if micro is not None and gas is not None:
        broken = f"{micro} * {gas} * {world} = {product}, not {total}"
    else:
        parts = " * ".join(str(part) for part in (micro, gas, world) if part is not None)
        broken = f"{total} cannot be divided by {parts}" + (f" = {product}" if " * " in parts else "")
    raise ConfigError(
        f"{source}: the batch sizes do not fit{lines}\n  world size = {world} (from {world_origin})\n"
        f"rule: {TOTAL} = {MICRO} * {STEPS} * world size, and {broken}\n"
        f"cure: {'; or '.join(_cures(total, micro, gas, world))}"
    )


def _cures(total: int, micro: int | None, gas: int | None, world: int) -> list[str]:
    near_total, near_micro, near_gas = nearest_batch(total, micro, gas, world)
    result = f"({near_micro} * {near_gas} * {world})"
    cures = [f"set {TOTAL} to {near_total} {result}"]
    if total % world == 0:
        per_rank = total // world
        if micro is not None and gas is not None and per_rank % micro == 0:
            cures.append(f"keep {TOTAL} {total} and set {STEPS} to {per_rank // micro}")
        elif micro is not None:
            fits = _nearest_divisor(per_rank // gas if gas and per_rank % gas == 0 else per_rank, micro)
            steps = gas if gas and per_rank == fits * gas else per_rank // fits
            cures.append(f"keep {TOTAL} {total} and set {MICRO} to {fits} and {STEPS} to {steps}")
        elif gas is not None:
            cures.append(f"keep {TOTAL} {total} and set {STEPS} to {_nearest_divisor(per_rank, gas)}")
    unit = (micro or 1) * (gas or 1)
    if total % unit == 0 and micro is not None and gas is not None:
        cures.append(f"these three values fit {total // unit} ranks: was the run started with its launcher?")
    return cures


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`; of two equally near ones the smaller."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min(sorted({*small, *(number // d for d in small)}), key=lambda divisor: abs(divisor - wanted))
