"""The measurement, on every rank. A time is that of the slowest rank, for each collective; a row has the median.

On the CPU each collective starts after a barrier and is timed by the wall clock. On a device they follow one
another on the stream, timed by its events; that has not been run yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles

import torch
import torch.distributed as dist

from zeroshard.bench.carriers import Carrier, Run
from zeroshard.bench.plan import DTYPES, Plan
from zeroshard.comm.bandwidth import bandwidth
from zeroshard.comm.timing import mark, seconds_between
from zeroshard.errors import CommError, RankLostError
from zeroshard.report.machine import available_memory

__all__ = ["Row", "measure", "memory_for_each_rank"]

_FEWEST, _MOST = 5, 200
"""Iterations of a row, where none are given."""
_COPIES = 3
"""Tensors of the longest size that an operation holds at most: input, output, and a copy in shared memory."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation at one size. Seconds; bandwidths in bytes per second."""

    operation: str
    carrier: str
    dtype: str
    nbytes: int
    """Of the longest tensor."""
    ranks: int
    iterations: int = 0
    median: float = 0.0
    low: float = 0.0
    """The 10th percentile."""
    high: float = 0.0
    """The 90th percentile."""
    note: str = ""
    """Why there are no figures."""

    @property
    def bandwidth(self) -> tuple[float, float]:
        """(algorithm, bus)."""
        return bandwidth(self.operation, self.nbytes, self.median, self.ranks)


def memory_for_each_rank(device: torch.device) -> int | None:
    """Bytes: half of what is free, divided by the ranks that share it; the least of all ranks. None: not known."""
    if device.type == "cpu":
        free = available_memory()
        sharers = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    else:
        module = torch.get_device_module(device)
        free = module.mem_get_info(device)[0] if hasattr(module, "mem_get_info") else None
        sharers = 1
    mine = torch.tensor([-1 if free is None else free // 2 // sharers], dtype=torch.int64, device=device)
    dist.all_reduce(mine, dist.ReduceOp.MIN)
    least = int(mine.item())
    return None if least < 0 else least


def measure(
    plan: Plan, carriers: Sequence[Carrier], device: torch.device, memory: int | None
) -> Iterator[Row]:
    """Row by row, the same on all ranks, which all iterate. `memory`: bytes that each rank may take."""
    size = dist.get_world_size()
    for operation in plan.operations:
        for name in plan.dtypes:
            for nbytes in plan.sizes:
                for carrier in carriers:
                    if operation in carrier.operations:
                        itemsize = DTYPES[name].itemsize
                        numel = max(nbytes // itemsize // size, 1) * size
                        known = Row(
                            operation=operation,
                            carrier=carrier.name,
                            dtype=name,
                            nbytes=numel * itemsize,
                            ranks=size,
                        )
                        yield _row(known, numel, plan, carrier, device, memory)


def _row(
    known: Row, numel: int, plan: Plan, carrier: Carrier, device: torch.device, memory: int | None
) -> Row:
    if known.operation == "point_to_point" and known.ranks == 1:
        return replace(known, note="needs 2 ranks")
    if memory is not None and _COPIES * known.nbytes > memory:
        needed = f"needs {_COPIES * known.nbytes / 1e6:.0f} MB on a rank"
        return replace(known, note=f"{needed}, and may take {memory / 1e6:.0f} MB, half of what is free")
    run: Run | None = None
    problem = ""
    try:
        run = carrier.prepare(known.operation, numel, DTYPES[known.dtype], device)
        for _ in range(max(plan.warmup, 1)):
            run()
    except RankLostError:
        raise
    except (
        RuntimeError,
        ValueError,
        TypeError,
    ) as error:  # how a dtype is refused differs from backend to backend
        problem = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if _fails_anywhere(problem, device):
        return replace(known, note=f"not possible with {known.dtype}: {problem}")
    assert run is not None
    times = _times(run, plan, device)
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    return replace(known, iterations=len(times), median=tenths[4], low=tenths[0], high=tenths[8])


def _fails_anywhere(problem: str, device: torch.device) -> bool:
    failed = torch.tensor([float(bool(problem))], device=device)
    dist.all_reduce(failed)
    count = int(failed.item())
    if count and count < dist.get_world_size():
        raise CommError(
            f"{count} of {dist.get_world_size()} ranks could not do what the others can"
            + (f"; this is rank {dist.get_rank()}: {problem}" if problem else "")
        )
    return bool(count)


def _times(run: Run, plan: Plan, device: torch.device) -> list[float]:
    """Seconds of each iteration, on the slowest rank."""
    count = plan.iterations
    if count is None:
        (once,) = _slowest(_timed(run, 1, device), device)
        count = min(max(int(plan.seconds / max(once, 1e-6)), _FEWEST), _MOST)
    return _slowest(_timed(run, count, device), device)


def _timed(run: Run, count: int, device: torch.device) -> list[float]:
    marks = []
    for _ in range(count):
        if device.type == "cpu":
            dist.barrier()
        began = mark(device)
        run()
        marks.append((began, mark(device)))
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return [seconds_between(began, ended) or 0.0 for began, ended in marks]


def _slowest(times: Sequence[float], device: torch.device) -> list[float]:
    told = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return [float(value) for value in told.tolist()]
