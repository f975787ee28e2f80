"""The same decoder under DDP, FSDP2, DeepSpeed (if installed) and zeroshard: time, memory, traffic, overhead.

    python benchmarks/compare.py                       print the tables
    python benchmarks/compare.py --write               and put them into benchmarks/RESULTS.md
    python benchmarks/compare.py --contestants ddp,zeroshard-3 --rounds 5

One launch holds all contestants and runs them in turn, so that they share whatever else the machine does.
All train on the same batches from the same weights; the run fails if their losses differ.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from contestants import Contestant, known
from decoder import MANY, OVERHEAD, Shape, build
from measure import device, elements_sent, interleave, peak_rise
from torch import Tensor

RESULTS = Path(__file__).parent / "RESULTS.md"
LOSS_RTOL = 1e-4  # fp32, after as many Adam steps as are measured; engines sum in different orders
BASE = "ddp"
WARMUP = 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare training engines on one decoder.")
    shape = Shape()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="timed blocks of each contestant")
    parser.add_argument("--steps", type=int, default=3, help="steps in a block")
    parser.add_argument("--overhead-rounds", type=int, default=10, help="0 leaves the overhead tables out")
    parser.add_argument("--contestants", help="comma-separated; default: all that can run here")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--seq", type=int, default=shape.seq)
    parser.add_argument("--layers", type=int, default=shape.layers)
    parser.add_argument("--width", type=int, default=shape.width)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    names = list(known(arguments.batch))
    chosen = arguments.contestants.split(",") if arguments.contestants else names
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"no contestant {', '.join(unknown)}; there are {', '.join(names)}")
    # The ratios need their base; the overhead needs its floor.
    arguments.contestants = [name for name in names if name in {*chosen, "plain", BASE}]
    return arguments


@dataclass
class Results:
    """What one decoder shape gave; seconds per step by contestant and round."""

    parameters: int
    times: dict[str, list[float]]
    losses: dict[str, list[float]]
    categories: dict[str, dict[str, int]] = field(default_factory=dict)
    rise: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    theory: dict[str, float | None] = field(default_factory=dict)


def make_batches(shape: Shape, batch: int, how_many: int = 8) -> list[Tensor]:
    """Each rank its own, the same for every contestant."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    size = (batch, shape.seq + 1)
    return [torch.randint(shape.vocab, size, generator=generator).to(device()) for _ in range(how_many)]


def measure(shape: Shape, batch: int, rounds: int, arguments: argparse.Namespace, details: bool) -> Results:
    builders = known(batch)
    names = arguments.contestants
    contestants: dict[str, Contestant] = {}
    for name in names:
        contestants[name] = builders[name](build(shape).to(device()))
    batches = make_batches(shape, batch)
    times, losses = interleave(contestants, batches, rounds, arguments.steps, WARMUP)
    parameters = sum(p.numel() for p in build(shape).parameters())
    results = Results(parameters, times, losses)
    for name, contestant in contestants.items():
        results.theory[name] = contestant.theory
        if details:
            results.traffic[name] = elements_sent(contestant, batches[0])
            results.rise[name] = peak_rise(lambda contestant=contestant: contestant.step(batches[0]))
            results.categories[name] = contestant.bytes_by_category()
    for contestant in contestants.values():
        contestant.close()
    return results


def check_losses(results: Results) -> float:
    """The largest relative difference to DDP's loss, of any contestant in any step; too much is an error.

    `plain` is left out: each of its ranks trains on its own data only.
    """
    worst = 0.0
    for name, losses in results.losses.items():
        if name == "plain":
            continue
        base = results.losses[BASE]
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses, base, strict=True))
        if difference > LOSS_RTOL:
            raise SystemExit(
                f"{name} trains differently: its loss is off DDP's by {difference:.1e} (relative)"
            )
        worst = max(worst, difference)
    return worst


def ratio_interval(times: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """A 95 % bootstrap interval of the ratio of medians; rounds are drawn in pairs, as they were run."""
    draw = random.Random(0)
    rounds = range(len(times))
    ratios = []
    for _ in range(2000):
        chosen = draw.choices(rounds, k=len(rounds))
        top = statistics.median(times[i] for i in chosen)
        ratios.append(top / statistics.median(base[i] for i in chosen))
    ratios.sort()
    return ratios[50], ratios[-51]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line = "|" + "|".join(" --- " if i == 0 else " ---: " for i in range(len(header))) + "|"
    return "\n".join(
        ["| " + " | ".join(header) + " |", line, *("| " + " | ".join(row) + " |" for row in rows)]
    )


def time_table(results: Results) -> str:
    base = results.times[BASE]
    rows = []
    for name, times in results.times.items():
        low, high = ratio_interval(times, base)
        ratio = statistics.median(times) / statistics.median(base)
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(times):.1f}",
                f"{1e3 * min(times):.1f}",
                f"{ratio:.3f}",
                f"{low:.3f} - {high:.3f}",
                f"{results.losses[name][-1]:.6f}",
            ]
        )
    return table(["", "median ms", "min ms", "ratio to DDP", "95 % interval", "last loss"], rows)


def memory_table(results: Results) -> str:
    categories = list(dict.fromkeys(name for found in results.categories.values() for name in found))
    rows = [
        [name, *(megabytes(found.get(category)) for category in categories), megabytes(results.rise[name])]
        for name, found in results.categories.items()
    ]
    return table(["MB on rank 0", *categories, "peak rise in a step"], rows)


def megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"


def traffic_table(results: Results) -> str:
    kinds = sorted({kind for found in results.traffic.values() for kind in found})
    rows = []
    for name, found in results.traffic.items():
        theory = results.theory[name]
        cells = [f"{found.get(kind, 0) / results.parameters:.4f}" for kind in kinds]
        total = sum(found.values()) / results.parameters
        rows.append([name, *cells, f"{total:.4f}", "-" if theory is None else f"{theory:.0f}"])
    return table(["elements / P in a step", *kinds, "all", "theory"], rows)


def overhead_table(results: Results) -> str:
    floor = statistics.median(results.times["plain"])
    rows = []
    for name, times in results.times.items():
        step = statistics.median(times)
        rows.append([name, f"{1e3 * step:.2f}", f"{1e3 * min(times):.2f}", f"{1e3 * (step - floor):.2f}"])
    return table(["", "median ms", "min ms", "ms above plain"], rows)


def machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    if torch.cuda.is_available():
        model += f", {torch.cuda.get_device_name()}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {versions}"


def report(main: Results, overhead: Sequence[Results], worst: float, arguments: argparse.Namespace) -> str:
    """`overhead`: of a small decoder and of many modules, or nothing."""
    command = shlex.join(["python", "benchmarks/compare.py", *sys.argv[1:]])
    shape = f"{arguments.layers} layers, width {arguments.width}, {main.parameters / 1e6:.1f} M parameters"
    parts = [
        "# Benchmark results",
        f"`{command}`  \n{datetime.date.today()}; {machine()}; one thread per rank.",
        f"Decoder of {shape} (embedding and head tied), {arguments.ranks} ranks, {arguments.batch} sequences "
        f"of {arguments.seq} tokens per rank, fp32, AdamW(fused), no clipping. {arguments.rounds} rounds of "
        f"{arguments.steps} steps, contestants in turn. Losses of all steps agree with DDP's within "
        f"{worst:.1e} (allowed: {LOSS_RTOL:.0e}). `plain` does not communicate and is no contestant.",
        "## Step time",
        time_table(main),
        "## Memory",
        "Resting bytes by category after a step, and the most that a step adds to them at one moment "
        "(activations, gradients, gathered parameters; shared memory is not seen).",
        memory_table(main),
        "## Traffic",
        "Elements through collectives in one step over the number of parameters P, as the ZeRO paper counts: "
        "an all-reduce of P is 2P; on the wire each rank sends (N-1)/N of it. Counted at torch's "
        "collectives, or by the engine where it has its own. FSDP2 keeps the root's parameters from "
        "forward to backward.",
        traffic_table(main),
    ]
    titles = {
        "## Host overhead": f"A step of {OVERHEAD.layers} layers of width {OVERHEAD.width}, one sequence of "
        f"{OVERHEAD.seq} tokens.",
        "## Many modules": f"A step of {MANY.layers} residual blocks of one Linear({MANY.width}, {MANY.width}) "
        f"each, one sequence of {MANY.seq} tokens.",
    }
    for (title, text), results in zip(titles.items(), overhead, strict=False):
        parts += [title, text, overhead_table(results)]
    return "\n\n".join(parts) + "\n"


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    shape = Shape(layers=arguments.layers, width=arguments.width, seq=arguments.seq)
    main_results = measure(shape, arguments.batch, arguments.rounds, arguments, details=True)
    overhead = [
        measure(small, 1, arguments.overhead_rounds, arguments, details=False)
        for small in (OVERHEAD, MANY)
        if arguments.overhead_rounds
    ]
    worst = max(map(check_losses, [main_results, *overhead]))
    if dist.get_rank() == 0:
        text = report(main_results, overhead, worst, arguments)
        print(text)
        if arguments.write:
            RESULTS.write_text(text)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        run(arguments)
        return 0
    from zeroshard.launch.runner import run_ranks

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would announce itself
    return run_ranks([__file__, *sys.argv[1:]], arguments.ranks)


if __name__ == "__main__":
    sys.exit(main())
