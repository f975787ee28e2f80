"""The instruments: time of interleaved blocks of steps, bytes allocated, elements sent.

Each looks from outside, with the same eye at every contestant.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from contestants import Contestant
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def interleave(
    contestants: Mapping[str, Contestant], batches: Sequence[Tensor], rounds: int, steps: int, warmup: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds per step of each contestant in each round, and its losses, both over all ranks.

    A round is a block of `steps` steps of each contestant in turn; the first one changes from round to round.
    What an engine leaves running at the end of a step is so paid for by its own next step, for all but one in
    `steps`. A block's time is that of the slowest rank. Round 0 is `warmup` steps and is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, list[Tensor]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        count = steps if number else warmup
        start = 0 if number == 0 else warmup + (number - 1) * steps
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            block = [batches[(start + step) % len(batches)] for step in range(count)]
            gc.collect()
            dist.barrier()
            begin = time.perf_counter()
            losses[name] += [contestants[name].step(batch) for batch in block]
            synchronize()
            seconds = time.perf_counter() - begin
            if number:
                times[name].append(seconds / count)
    return (
        {name: over_ranks(values, dist.ReduceOp.MAX) for name, values in times.items()},
        {
            name: over_ranks(values, dist.ReduceOp.SUM, dist.get_world_size())
            for name, values in losses.items()
        },
    )


def over_ranks(values: Sequence[Any], how: Any, divisor: int = 1) -> list[float]:
    vector = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device())
    dist.all_reduce(vector, how)
    return (vector / divisor).tolist()


def device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def synchronize() -> None:
    if device().type != "cpu":
        torch.accelerator.synchronize()


def peak_rise(step: Callable[[], object]) -> int:
    """Most bytes allocated at one moment of a step, above what was allocated before it.

    On the CPU from the profiler's allocation events, which see every tensor's storage, also in C++.
    """
    if device().type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        step()
        return torch.accelerator.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    level = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        level += change
        peak = max(peak, level)
    return peak


class CountElements(TorchDispatchMode):
    """Elements that pass through torch's collectives, by kind, as the ZeRO paper counts them (section 7).

    An all-gather or reduce-scatter of P elements is P, an all-reduce is one of each: 2P. Per rank and on the
    wire it is (N-1)/N of that. C++ callers, such as DDP's reducer, are seen too: on the CPU they run in this
    thread.
    """

    # op name -> (kind, which argument holds the full tensor, passes over it)
    KINDS = {  # noqa: RUF012
        "allreduce_": ("all-reduce", 0, 2),
        "_allgather_base_": ("all-gather", 0, 1),
        "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
        "allgather_": ("all-gather", 0, 1),
        "reduce_scatter_": ("reduce-scatter", 1, 1),
        "broadcast_": ("broadcast", 0, 1),
    }

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name in self.KINDS:
                kind, position, passes = self.KINDS[name]
                self.elements[kind] += passes * count(args[position])
            elif name not in ("barrier", "monitored_barrier_"):
                self.elements[name] += sum(count(argument) for argument in args)
        return func(*args, **(kwargs or {}))


def count(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return sum(count(item) for item in value) if isinstance(value, list | tuple) else 0


def elements_sent(contestant: Contestant, batch: Tensor) -> dict[str, int]:
    """Of one step. What the contestant counts itself is added to what torch's collectives saw."""
    before = Counter(contestant.elements_sent() or {})
    with CountElements() as seen:
        contestant.step(batch)
    own = Counter(contestant.elements_sent() or {})
    own.subtract(before)
    return dict(seen.elements + own)
