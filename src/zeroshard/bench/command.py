"""`zeroshard bench`: started alone it starts its ranks, as `zeroshard run` does; as a rank it measures."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from zeroshard.bench import output
from zeroshard.bench.carriers import Carrier, SeamCarrier, TorchCarrier
from zeroshard.bench.measure import Row, measure, memory_for_each_rank
from zeroshard.bench.plan import Plan, dtypes_of, operations_of, sizes_of
from zeroshard.comm import open_collectives
from zeroshard.comm.bandwidth import OPERATIONS
from zeroshard.console import command_line
from zeroshard.errors import ConfigError
from zeroshard.launch.runner import run_ranks
from zeroshard.world import TORCHRUN, join

__all__ = ["main"]

_BACKENDS = ("gloo", "nccl")
_SIZES_CPU, _SIZES_DEVICE = "4K,64K,1M,16M", "4K,64K,1M,16M,256M"


def _command(
    ops: Annotated[str, typer.Option(help="Which, with commas.")] = ",".join(OPERATIONS),
    sizes: Annotated[
        str | None,
        typer.Option(help=f"Bytes of the longest tensor. Default: {_SIZES_CPU}; on a GPU also 256M."),
    ] = None,
    dtypes: Annotated[str, typer.Option(help="fp32, bf16, fp16, fp8, int8 and others.")] = "fp32,bf16",
    backend: Annotated[
        str | None, typer.Option(help="gloo or nccl. Default: nccl where there is a GPU for it.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, max=1024, help="Default: one per GPU with nccl, else 2."),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Of each row. Default: as many as take 0.2 seconds, 5 to 200.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=1, help="Iterations before, which are not timed.")] = 2,
    csv: Annotated[
        Path | None, typer.Option(help="Also write the rows to this file.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw bus bandwidth over size (.png, .svg, .pdf).", show_default=False),
    ] = None,
) -> int:
    """Measure collectives between ranks: torch's, and beside them those that engines use. Starts its own ranks, or
    measures as one where a launcher (zeroshard run -m zeroshard bench, torchrun) has started it."""
    chosen = _backend(backend)
    plan = Plan(
        operations=operations_of(ops),
        sizes=sizes_of(sizes or (_SIZES_CPU if chosen == "gloo" else _SIZES_DEVICE)),
        dtypes=dtypes_of(dtypes),
        iterations=iterations,
        warmup=warmup,
    )
    if os.environ.get("RANK", "0") == "0":  # it writes them
        _check_files(csv, plot)
    if all(name in os.environ for name in TORCHRUN):
        started = os.environ["WORLD_SIZE"]
        if ranks is not None and str(ranks) != started:
            raise ConfigError(f"--ranks: {ranks}, but a launcher has started {started}; leave it out")
        _measure(plan, chosen, csv, plot)
        return 0
    count = _ranks(ranks, chosen)
    words = ["--backend", chosen, "--ops", ",".join(plan.operations), "--dtypes", ",".join(plan.dtypes)]
    words += ["--sizes", ",".join(str(size) for size in plan.sizes), "--warmup", str(warmup)]
    for option, value in (("--iterations", iterations), ("--csv", csv), ("--plot", plot)):
        words += [] if value is None else [option, str(value)]
    return run_ranks(["-m", "zeroshard", "bench", *words], count)


main = command_line(_command, "zeroshard bench")


def _backend(given: str | None) -> str:
    usable = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
    if given is None:
        return "nccl" if usable else "gloo"
    if given not in _BACKENDS:
        raise ConfigError(f"--backend: {given!r} is not one of {', '.join(_BACKENDS)}")
    if given == "nccl" and not usable:
        lacks = (
            "this torch was built without it" if not dist.is_nccl_available() else "there is no GPU for it"
        )
        raise ConfigError(f"--backend: nccl cannot be used, because {lacks}; gloo measures CPU ranks")
    return given


def _ranks(given: int | None, backend: str) -> int:
    there = torch.cuda.device_count()
    if backend == "nccl" and given is not None and given > there:
        raise ConfigError(f"--ranks: {given} ranks need as many GPUs with nccl, and there are {there}")
    return given or (there if backend == "nccl" else 2)


def _check_files(csv: Path | None, plot: Path | None) -> None:
    """Before anything is measured: what cannot be written afterwards."""
    for option, file in (("--csv", csv), ("--plot", plot)):
        if file is None:
            continue
        there = file.exists()
        try:
            file.open("ab").close()
        except OSError as error:
            raise ConfigError(f"{option}: {file} cannot be written: {error.strerror}") from error
        if not there:
            file.unlink()
    if plot is None:
        return
    if csv is not None and csv.resolve() == plot.resolve():
        raise ConfigError(f"--csv and --plot: both would be written to {plot}")
    if plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot: {plot} must end in .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot takes matplotlib, which is not installed: pip install 'zeroshard[plot]'")


def _measure(plan: Plan, backend: str, csv: Path | None, plot: Path | None) -> None:
    if backend == "gloo":
        dist.init_process_group("gloo")
    world = join()
    first = world.rank == 0
    carriers: list[Carrier] = [TorchCarrier(backend)]
    seam: SeamCarrier | None = None
    if world.device.type == "cpu" and world.size > 1:
        seam = SeamCarrier(open_collectives(world.group, world.device))
        carriers.append(seam)
    if first:
        print(f"{world.size} rank(s) on {world.device.type}, {backend}")
        print(output.HEADER, flush=True)
    rows: list[Row] = []
    for row in measure(plan, carriers, world.device, memory_for_each_rank(world.device)):
        rows.append(row)
        if first:
            print(output.line(row), flush=True)
    if first:
        print(output.LEGEND, flush=True)
        if csv is not None:
            output.write_csv(csv, rows)
        if plot is not None:
            output.plot(plot, rows)
        for file in filter(None, (csv, plot)):
            print(f"zeroshard: wrote {file}", file=sys.stderr)
    if seam is not None:
        seam.close()
    dist.barrier()
    dist.destroy_process_group()
