"""Rows as lines of a table, as CSV, and as a plot."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroshard.bench.measure import Row
from zeroshard.wording import size_in_words

__all__ = ["CSV_HEADER", "HEADER", "LEGEND", "cells", "line", "plot", "write_csv"]

HEADER = (
    f"{'operation':15}{'carried by':15}{'dtype':7}{'size':>11}{'median':>11}{'10 to 90 %':>23}"
    f"{'algbw GB/s':>12}{'busbw GB/s':>12}"
)
LEGEND = (
    "sizes are of the longest tensor; bandwidths as in nccl-tests: size / median time, and what the bus carries\n"
    "of it: 2(n-1)/n for all-reduce, (n-1)/n for all-gather, reduce-scatter and all-to-all, 1 for the others"
)
CSV_HEADER = (
    "operation",
    "carried_by",
    "dtype",
    "bytes",
    "ranks",
    "iterations",
    "median_seconds",
    "p10_seconds",
    "p90_seconds",
    "algbw_gb_per_s",
    "busbw_gb_per_s",
    "note",
)


def line(row: Row) -> str:
    """A line of the table."""
    start = f"{row.operation:15}{row.carrier:15}{row.dtype:7}{size_in_words(row.nbytes):>11}"
    if row.note:
        return f"{start}  {row.note}"
    algorithm, bus = row.bandwidth
    spread = f"{_time(row.low)} - {_time(row.high)}"
    return f"{start}{_time(row.median):>11}{spread:>23}{algorithm / 1e9:12.3f}{bus / 1e9:12.3f}"


def cells(row: Row) -> tuple[Any, ...]:
    """The row of a CSV file, in the order of `CSV_HEADER`; without figures where there are none."""
    known = (row.operation, row.carrier, row.dtype, row.nbytes, row.ranks)
    if row.note:
        return (*known, *([""] * 6), row.note)
    algorithm, bus = row.bandwidth
    return (*known, row.iterations, row.median, row.low, row.high, algorithm / 1e9, bus / 1e9, "")


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(CSV_HEADER)
        writer.writerows(cells(row) for row in rows)


def plot(file: Path, rows: Sequence[Row]) -> None:
    """Bus bandwidth over size, an operation in each panel. Takes matplotlib."""
    from matplotlib.figure import Figure  # without pyplot, which would look for a display

    measured = [row for row in rows if not row.note]
    operations = list(dict.fromkeys(row.operation for row in measured))
    columns = min(len(operations), 3) or 1
    lines = -(-len(operations) // columns) or 1
    figure = Figure(figsize=(4.5 * columns, 3.5 * lines), layout="constrained")
    for place, operation in enumerate(operations):
        panel = figure.add_subplot(lines, columns, place + 1)
        series: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for row in measured:
            if row.operation == operation:
                series.setdefault((row.carrier, row.dtype), []).append((row.nbytes, row.bandwidth[1] / 1e9))
        for (carrier, dtype), points in series.items():
            sizes, speeds = zip(*sorted(points), strict=True)
            panel.plot(sizes, speeds, marker="o", label=f"{carrier}, {dtype}")
        panel.set_xscale("log", base=2)
        panel.set_title(f"{operation}, {measured[0].ranks} ranks")
        panel.set_xlabel("bytes")
        panel.set_ylabel("bus bandwidth, GB/s")
        panel.legend(fontsize="small")
    figure.savefig(file)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"
