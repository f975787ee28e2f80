"""`zeroshard check`: the numbers are those of plain PyTorch, on this machine, shown rather than promised."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from torch import nn

from zeroshard.testing import FP32_TOLERANCE, RankPool, measure_parity
from zeroshard.testing.models import smollm2, smollm2_batch, smollm2_folder, tiny, tiny_batch

__all__ = ["check", "main"]

STAGES = (0, 1, 2, 3)


class Case(NamedTuple):
    """One setting under which all stages are compared with the same reference."""

    dtype: str
    accumulation: int
    clipping: float


def fine_tuning_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW at a usual fine-tuning rate. It divides by the gradient's own size, so where a gradient is next to
    nothing it turns the last bits of a sum, which depend on its order, into a part of the rate; an epsilon
    well above those bits keeps them what they are."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """For a large model: among 1e8 elements there are always some that Adam's division blows up (above), in
    plain PyTorch as well when two runs sum in another order."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Subject(NamedTuple):
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    cases: tuple[Case, ...]
    steps: int
    timeout: float


SUBJECTS = {
    "tiny": Subject(
        tiny,
        tiny_batch,
        fine_tuning_adamw,
        tuple(itertools.starmap(Case, itertools.product(("fp32", "bf16"), (1, 2), (0.0, 0.1)))),
        steps=5,
        timeout=120.0,
    ),
    # Each thing once with and once without, since a run of this one takes a while. One step: from the second on
    # thirty layers make 1e-5 of the last bit in which two weights differ.
    "smollm2": Subject(
        smollm2,
        smollm2_batch,
        sgd,
        (Case("fp32", 1, 0.0), Case("fp32", 2, 0.1), Case("bf16", 1, 0.1), Case("bf16", 2, 0.0)),
        steps=1,
        timeout=900.0,
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line; the exit status."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(
        help="Train one model under plain PyTorch and under ZeRO stages 0 to 3, and compare the parameters. "
        "Exit status 1 when one differs beyond tolerance."
    )(check)
    return int(app(list(arguments), prog_name="zeroshard check", standalone_mode=False) or 0)


def check(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SUBJECTS)}.")] = "tiny",
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Optimizer steps of each run; default 5 for tiny, 1 for smollm2 (deep models amplify rounding).",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks (CPU processes).")] = 2,
) -> int:
    """Compare and print one line per run."""
    if model not in SUBJECTS:
        raise typer.BadParameter(f"{model!r} is not one of {', '.join(SUBJECTS)}", param_hint="--model")
    if model == "smollm2":
        smollm2_folder()  # missing: said at once, not by every worker
    subject = SUBJECTS[model]
    count = steps or subject.steps
    console = Console(highlight=False)
    console.print(f"{model}, {count} step(s), {ranks} ranks: largest |p - reference| / max |reference|")
    console.print(f"{'dtype':8}{'micro-batches':>14}{'clip':>7}{'stage':>7}{'difference':>13}{'limit':>9}")
    failed = 0
    with RankPool(ranks) as pool:
        for case, stage in itertools.product(subject.cases, STAGES):
            difference, limit = _run(subject, case, stage, count, pool)
            good = difference <= limit
            failed += not good
            console.print(
                f"{case.dtype:8}{case.accumulation:14}{case.clipping:7}{stage:7}{difference:13.2e}{limit:9.0e}  "
                + ("[green]same[/]" if good else "[red]DIFFERENT[/]")
            )
    console.print("[green]all the same[/]" if not failed else f"[red]{failed} runs differ[/]")
    return 1 if failed else 0


def _run(subject: Subject, case: Case, stage: int, steps: int, pool: RankPool) -> tuple[float, float]:
    """(largest difference, what is allowed) of one run."""
    config = {
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "bf16": {"enabled": case.dtype == "bf16"},
        # Then bf16 is compared to the last bits too: rounding on the wire would hide an error of its size.
        "communication_data_type": "fp32",
        # Everything that stage 3 can do happens: nothing persists, nothing is kept for reuse.
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        },
    }
    difference = measure_parity(
        subject.build,
        subject.batch,
        config,
        optimizer_fn=subject.optimizer,
        steps=steps,
        pool=pool,
        timeout=subject.timeout,
    )
    return difference.relative, FP32_TOLERANCE
