"""The log of collectives as a table and as a dict, and who waited for whom.

    zeroshard.comm.log_summary(show_straggler=True)      all ranks call it; rank 0 prints a table

The straggler column is the time that this rank spent waiting for the slowest one. Of one collective, the rank that
comes last is blocked (`timing`) only as long as the collective itself takes, the others longer; so the least of
all ranks is the collective's own time, and what a rank was blocked beyond it is waiting. Example: ranks are blocked
5, 2 and 9 ms in a collective; it took 2 ms, rank 1 came last, and the others waited 3 and 7 ms for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm.agreement import ballot, unanimous
from zeroshard.comm.bandwidth import bandwidth
from zeroshard.comm.log import LOG, REMEMBERED, UNITS, Series, is_first_rank
from zeroshard.comm.timing import LoggedGroup
from zeroshard.wording import size_in_words

__all__ = ["log_summary"]


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print, on rank 0, what was logged: a row per operation, message size and number of ranks.

    All ranks call it, since `show_straggler` compares the times of all of them; only of groups that are open, so
    before `engine.close()`. Sizes are those of the longest tensor. Averages are plain means.

    Returns:
        None, or with `return_dict` a dict as DeepSpeed's: `summary` and `straggler_analysis` (None when it was not
        asked for) by operation and message size in bytes, and `metadata`. Times are in ms, bandwidths in Gbit/s.
    """
    LOG.settle()
    rows = [_Row.of(series) for series in LOG.rows()]
    if show_straggler:
        _compare(rows)
    merged = list(_merged(rows))
    if is_first_rank():
        print("\n".join(_table(merged, show_straggler)), flush=True)
    return _as_dict(merged, show_straggler) if return_dict else None


@dataclass(kw_only=True)
class _Row:
    """What is printed of one or more series."""

    series: Series
    count: int
    finished: int
    latency: float
    blocked: float
    compared: int = 0
    """Collectives whose times all ranks have told."""
    own: float = 0.0
    """Seconds of those that the fastest rank was blocked: the collectives' own time."""
    straggler: float = 0.0
    """Seconds of those that this rank was blocked beyond it."""
    slowest: int | None = None
    """The rank that was waited for most: it waited least."""

    @classmethod
    def of(cls, series: Series) -> _Row:
        return cls(
            series=series,
            count=series.count,
            finished=series.finished,
            latency=series.latency,
            blocked=series.blocked,
        )

    @property
    def bandwidth(self) -> tuple[float, float]:
        series = self.series
        return bandwidth(series.verb, series.nbytes * self.finished, self.latency, series.group.size)


def _merged(rows: Sequence[_Row]) -> Iterator[_Row]:
    """Groups of the same size in one row."""
    found: dict[tuple[str, int, int], _Row] = {}
    for row in rows:
        key = row.series.name, row.series.nbytes, row.series.group.size
        into = found.setdefault(key, row)
        if into is not row:
            into.count += row.count
            into.finished += row.finished
            into.latency += row.latency
            into.blocked += row.blocked
            into.compared += row.compared
            into.own += row.own
            into.straggler += row.straggler
            into.slowest = into.slowest if into.slowest == row.slowest else None
    yield from found.values()


def _compare(rows: Sequence[_Row]) -> None:
    """Tell the others how long this rank was blocked, group by group, and take the least. All ranks call it."""
    for group in LOG.groups:
        collectives = group.collectives
        if collectives is None or group.size == 1:
            continue
        own = [row for row in rows if row.series.group is group]
        told = zlib.crc32(repr([(row.series.name, row.series.nbytes, row.count) for row in own]).encode())
        device = _device()
        agreed = collectives.sum_to_host(torch.tensor(ballot([told]), dtype=torch.float64, device=device))
        if not all(unanimous(agreed, group.size)):
            continue
        times = [seconds for row in own for seconds in row.series.recent]
        if not times:
            continue
        shard = torch.tensor(times, dtype=torch.float64, device=device)
        full = torch.empty(len(times) * group.size, dtype=torch.float64, device=device)
        collectives.all_gather(full, shard).wait()
        by_rank = full.view(group.size, len(times)).cpu()
        start = 0
        for row in own:
            end = start + len(row.series.recent)
            _judge(row, by_rank[:, start:end], group)
            start = end


def _judge(row: _Row, blocked: torch.Tensor, group: LoggedGroup) -> None:
    """`blocked`: seconds by (rank of the group, collective)."""
    known = blocked[:, ~blocked.isnan().any(dim=0)]
    least = known.amin(dim=0) if known.numel() else known.new_zeros(0)
    row.compared = known.shape[1]
    row.own = float(least.sum())
    row.straggler = float((known[group.rank] - least).sum())
    waited = (known - least).sum(dim=1)
    row.slowest = group.ranks[int(waited.argmin())] if row.compared else None


def _device() -> torch.device:
    """Where the collectives take place."""
    if dist.is_initialized() and dist.get_backend() != "gloo":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return torch.device("cpu")


def _table(rows: Sequence[_Row], show_straggler: bool) -> list[str]:
    if not rows:
        return [
            "no collectives were logged: comms_logger.enabled in the config of an engine switches it on, and a "
            "run of one rank has none"
        ]
    width = max(24, *(len(row.series.name) + 2 for row in rows))
    header = f"{'operation':{width}}{'size':>10}{'ranks':>6}{'count':>8}{'total ms':>11}{'mean ms':>10}"
    header += f"{'blocked ms':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}"
    if show_straggler:
        header += f"{'straggler ms':>14}{'mean ms':>10}{'slowest':>9}"
    lines = [header]
    for row in rows:
        algorithm, bus = row.bandwidth
        series = row.series
        line = (
            f"{series.name:{width}}{size_in_words(series.nbytes, UNITS):>10}{series.group.size:6}{row.count:8}"
            f"{1e3 * row.latency:11.2f}{1e3 * row.latency / max(row.finished, 1):10.3f}{1e3 * row.blocked:12.2f}"
            f"{algorithm / 1e9:12.3f}{bus / 1e9:12.3f}"
        )
        if show_straggler and row.compared:
            slowest = "-" if row.slowest is None else str(row.slowest)
            line += f"{1e3 * row.straggler:14.2f}{1e3 * row.straggler / row.compared:10.3f}{slowest:>9}"
        elif show_straggler:
            line += f"{'-':>14}{'-':>10}{'-':>9}"
        lines.append(line)
    if show_straggler:
        lines.append("straggler: how long rank 0 waited for the slowest rank, the one named")
        if any(row.count > REMEMBERED for row in rows):
            lines.append(f"(of the latest {REMEMBERED} collectives of a row)")
    return lines


def _as_dict(rows: Sequence[_Row], show_straggler: bool) -> dict[str, Any]:
    summary: dict[str, dict[int, Any]] = {}
    waiting: dict[str, dict[int, Any]] = {}
    for row in rows:
        name, nbytes = row.series.name, row.series.nbytes
        algorithm, bus = row.bandwidth
        told = {"msg_size_bytes": nbytes, "msg_size_str": size_in_words(nbytes, UNITS)}
        summary.setdefault(name, {})[nbytes] = {
            "count": row.count,
            "total_latency_ms": 1e3 * row.latency,
            "avg_latency_ms": 1e3 * row.latency / max(row.finished, 1),
            "total_blocked_ms": 1e3 * row.blocked,
            "tput_avg_gbps": 8 * algorithm / 1e9,
            "busbw_avg_gbps": 8 * bus / 1e9,
            **told,
        }
        waiting.setdefault(name, {})[nbytes] = {
            "count": row.compared,
            "total_comm_lat_ms": 1e3 * row.own,
            "total_straggler_ms": 1e3 * row.straggler,
            "avg_comm_lat_ms": 1e3 * row.own / max(row.compared, 1),
            "avg_straggler_ms": 1e3 * row.straggler / max(row.compared, 1),
            "slowest_rank": row.slowest,
            **told,
        }
    running = dist.is_initialized()
    return {
        "summary": summary,
        "straggler_analysis": waiting if show_straggler else None,
        "metadata": {
            "world_size": dist.get_world_size() if running else 1,
            "rank": dist.get_rank() if running else 0,
            "timestamp": datetime.now().isoformat(),
        },
    }
