"""`zeroshard explain`: the plan of a step, before anything is bought or started.

The real engine runs two steps of a small model as one rank of N, with collectives that move nothing and
tensors that have no memory; what it planned is printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from zeroshard.console import command_line
from zeroshard.engine import Engine
from zeroshard.planner.rehearsal import rehearse
from zeroshard.planner.timeline import LEGEND, timeline
from zeroshard.testing.models import tiny, tiny_batch

__all__ = ["explain", "main", "planned_engine"]


_TABLE_WIDTH = 100
"""Where the terminal is narrower, or there is none, lines run over: figures cut short would say nothing."""


def explain(
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    ranks: Annotated[int, typer.Option(min=1, max=1_000_000, help="Data-parallel ranks.")] = 2,
    persistence: Annotated[int, typer.Option(min=0, help="stage3_param_persistence_threshold.")] = 200,
    prefetch: Annotated[int, typer.Option(min=0, help="stage3_prefetch_bucket_size.")] = 50_000,
    max_live: Annotated[int, typer.Option(min=0, help="stage3_max_live_parameters.")] = 1_000_000_000,
    reuse: Annotated[int, typer.Option(min=0, help="stage3_max_reuse_distance.")] = 0,
    mics: Annotated[int, typer.Option(min=-1, help="mics_shard_size.")] = -1,
    hpz: Annotated[int, typer.Option(min=0, help="zero_hpz_partition_size.")] = 1,
) -> int:
    """Show the planned schedule of the tiny model as a time line of what is live."""
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": persistence,
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_max_live_parameters": max_live,
        "stage3_max_reuse_distance": reuse,
        "mics_shard_size": mics,
        "zero_hpz_partition_size": hpz,
    }
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _TABLE_WIDTH)
    with planned_engine(zero, ranks) as engine:
        _print_buckets(console, engine)
        schedule = engine.schedule
        assert schedule is not None
        shown = {b.index: b.name for b in engine.layout.buckets if not b.resident}
        console.print(f"\n[bold]schedule[/] (digest {schedule.digest:08x})\n{schedule}", markup=True)
        if shown:
            console.print("\n[bold]time line[/]")
            for line in timeline(schedule, shown, {b.index: b.padded for b in engine.layout.buckets}):
                console.print(line, markup=False)
            console.print(LEGEND, style="dim", markup=False)
        else:
            console.print("\nNothing is gathered or freed in a step: all parameters are resident.")
    return 0


main = command_line(explain, "zeroshard explain")


@contextlib.contextmanager
def planned_engine(zero: dict[str, Any], ranks: int) -> Iterator[Engine]:
    """The engine as rank 0 of `ranks`, after two steps of the tiny model that cost no memory."""
    raw = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    with rehearse(tiny, raw, ranks) as engine:
        for step in range(2):
            engine.backward(engine(torch.empty_like(tiny_batch(step, 0, 0))))
            engine.step()
        yield engine


def _print_buckets(console: Console, engine: Engine) -> None:
    policy = engine.policy
    axes = f", {policy.axes}" if policy.axes else ""
    table = Table(title=f"ZeRO stage {policy.stage} on {policy.world} ranks{axes}", title_justify="left")
    for heading in ("bucket", "holds", "parameters", "elements", "per rank", "kind"):
        table.add_column(heading, justify="left" if heading in ("holds", "kind") else "right")
    for bucket in engine.layout.buckets:
        kind = ("resident" if bucket.resident else "gathered at use") + (
            "" if bucket.trainable else ", frozen"
        )
        counts = (len(bucket.slots), bucket.padded, bucket.shard_numel)
        table.add_row(str(bucket.index), bucket.name, *(f"{count:,}" for count in counts), kind)
    console.print(table)
