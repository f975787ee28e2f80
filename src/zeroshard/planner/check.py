"""`zeroshard check`: the numbers are those of plain PyTorch, on this machine, shown rather than promised.

A row is one setting, run at every stage. Rows are grouped by what varies in them, and their settings are well
conditioned: two runs of plain PyTorch that sum in another order must themselves agree to the limit, or a row
would say nothing. What amplifies the last bits, and what is done about it:

    dividing by the gradient's size   (Adam and its kin, Adagrad, RMSprop) makes a part of the rate out of the
                                      last bits of a gradient that is next to nothing: eps is well above those
                                      bits. What the first steps divide by is small in Adagrad and RMSprop, so
                                      their rates are small too.
    16-bit weights                    turn a last bit of a master, where it decides a rounding, into 2^-9 of the
                                      weight, which moves the roundings of what is computed from it: 1e-3 of the
                                      next gradient, on which Adam's division builds. Rows in 16 bit train with
                                      SGD, at a rate at which that is 3e-7; an error of 1e-3 is 3e-6 and more.
    Newton-Schulz in bf16             (Muon) does the same to the update of a matrix: 1e-3 of it. The rate of
                                      matrices is so small that this stays below the limit. Orthogonalising a
                                      part of a matrix would change all of the update, 1e-4 of the weights.
    a sign                            (Lion) of a sum that is 0 but for its last bits is a whole rate. One
                                      micro-batch, so that sums of two ranks have no order.

The trust ratio of Lamb and the factored moments of Adafactor are means over whole matrices and amplify nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from torch import nn

from zeroshard.console import command_line
from zeroshard.testing import FP32_TOLERANCE, RankPool, measure_parity
from zeroshard.testing.loops import LOOPS
from zeroshard.testing.models import smollm2, smollm2_batch, smollm2_folder, tiny, tiny_batch

__all__ = ["check", "main"]

STAGES = (0, 1, 2, 3)
NAME_WIDTH = 48


class Row(NamedTuple):
    """One setting under which all stages are compared with the same reference."""

    group: str
    name: str
    steps: int
    config: Mapping[str, Any]
    loop: str = "managed"
    zero: Mapping[str, Any] = {}
    """Of `zero_optimization`, besides the stage."""
    stages: Sequence[int] = STAGES
    ranks: int = 1
    """It takes a multiple of so many."""

    @property
    def title(self) -> str:
        """What `--only` looks into."""
        return f"{self.group}: {self.name}"


ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "eps": 1e-5}}
"""A usual fine-tuning rate."""


def _sgd(rate: float) -> dict[str, Any]:
    return {"type": "SGD", "params": {"lr": rate, "momentum": 0.9}}


PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}

OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Adam": ("Adam", {"lr": 1e-4, "eps": 1e-5, "weight_decay": 0.1, "adam_w_mode": False}),
    "AdamW": ("AdamW", {"lr": 1e-4, "eps": 1e-5, "weight_decay": 0.1}),
    "AdamW, no bias correction": (
        "AdamW",
        {"lr": 1e-4, "eps": 1e-5, "weight_decay": 0.1, "bias_correction": False},
    ),
    "SGD, momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"lr": 1e-4, "eps": 1e-5}),
    "RMSprop": ("RMSprop", {"lr": 1e-5, "eps": 1e-5, "momentum": 0.9}),
    "Lion": ("Lion", {"lr": 1e-4, "weight_decay": 0.1}),
    "Lamb": ("Lamb", {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}),
    "Adafactor": ("Adafactor", {"lr": 1e-3, "weight_decay": 0.1}),
    "Muon": ("Muon", {"muon_lr": 2e-6, "adam_lr": 1e-4, "eps": 1e-5}),
    "NAdam, of torch.optim": ("NAdam", {"lr": 1e-4, "eps": 1e-5}),
}
"""Name of the row -> `optimizer.type` and `optimizer.params`."""

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 3, "warmup_type": "linear"},
    "OneCycle": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-4, "cycle_first_step_size": 2},
}


def tiny_rows() -> tuple[Row, ...]:
    """All there is: every precision with and without accumulation and clipping; the rest in fp32."""
    rows = []
    for dtype, micro, clip in itertools.product(PRECISIONS, (1, 2), (0.0, 0.1)):
        # Clipping to 0.1 divides these gradients by about a hundred.
        optimizer = ADAMW if dtype == "fp32" else _sgd(1e-2 if clip else 1e-4)
        rows.append(_precision_row(dtype, micro, clip, 5 if dtype == "fp32" else 3, optimizer))
    for name, (type_, params) in OPTIMIZERS.items():
        config = {"optimizer": {"type": type_, "params": params}, "gradient_clipping": 0.0}
        rows.append(Row("optimizer", name, 3, config))
    for name, params in SCHEDULES.items():
        scheduler = {"type": name, "params": params}
        rows.append(
            Row("schedule", name, 4, {"optimizer": ADAMW, "scheduler": scheduler, "gradient_clipping": 0.0})
        )
    for name in LOOPS:
        config = {"optimizer": ADAMW, "gradient_accumulation_steps": 3, "gradient_clipping": 0.1}
        rows.append(Row("loop", name, 2, config, name))
    window = {"optimizer": ADAMW, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
    for name, zero, stages in (
        ("MiCS, shard groups of 2", {"mics_shard_size": 2}, (1, 2, 3)),
        ("hpZ, second shards in groups of 2", {"zero_hpz_partition_size": 2}, (3,)),
    ):
        rows.append(Row("groups", name, 3, window, zero=zero, stages=stages, ranks=4))
    return tuple(rows)


def smollm2_rows() -> tuple[Row, ...]:
    """Each thing once with and once without, since a run of this one takes a while. SGD, since among 1e8
    elements there are always some that Adam's division blows up, and one step, since from the second on thirty
    layers make 1e-5 of the last bit in which two weights differ."""
    cases = (("fp32", 1, 0.0), ("fp32", 2, 0.1), ("bf16", 1, 0.1), ("bf16", 2, 0.0))
    return tuple(_precision_row(dtype, micro, clip, 1, _sgd(0.1)) for dtype, micro, clip in cases)


def _precision_row(dtype: str, micro: int, clip: float, steps: int, optimizer: Mapping[str, Any]) -> Row:
    name = f"{dtype}, {micro} micro-batch{'es' if micro > 1 else ''}{f', clip {clip:g}' if clip else ''}"
    config = {
        **PRECISIONS[dtype],
        "optimizer": optimizer,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": clip,
    }
    return Row("precision", name, steps, config)


class Subject(NamedTuple):
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    rows: tuple[Row, ...]
    timeout: float


SUBJECTS = {
    "tiny": Subject(tiny, tiny_batch, tiny_rows(), timeout=120.0),
    "smollm2": Subject(smollm2, smollm2_batch, smollm2_rows(), timeout=900.0),
}


def check(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SUBJECTS)}.")] = "tiny",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps of every run; default: what the row needs, 1 to 5."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Ranks (CPU processes).")] = 2,
    only: Annotated[
        str | None, typer.Option(help="Run the rows whose name contains this, such as Muon or loop.")
    ] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="Print the names of the rows.")] = False,
) -> int:
    """Train one model under plain PyTorch and under ZeRO stages 0 to 3, and compare the parameters: in every
    precision, with every optimizer, in every way to write the loop. Exit status 1 when one differs too much."""
    if model not in SUBJECTS:
        raise typer.BadParameter(f"{model!r} is not one of {', '.join(SUBJECTS)}", param_hint="--model")
    subject = SUBJECTS[model]
    rows = _chosen(subject.rows, only)
    console = Console(highlight=False, soft_wrap=True)
    if list_rows:
        for row in rows:
            console.print(row.title + (f" (--ranks {row.ranks})" if row.ranks > 1 else ""))
        return 0
    left_out = [row for row in rows if ranks % row.ranks]
    rows = tuple(row for row in rows if row not in left_out)
    if not rows:
        raise typer.BadParameter(
            f"these rows take a multiple of {left_out[0].ranks} ranks", param_hint="--ranks"
        )
    if model == "smollm2":
        smollm2_folder()  # missing: said at once, not by every worker
    console.print(
        f"{model}, {ranks} ranks: largest |p - reference| / max(0.02, max |reference|); "
        f"the limit is {FP32_TOLERANCE:g}"
    )
    console.print(f"{'':{NAME_WIDTH}}{'steps':>6}" + "".join(f"{f'stage {stage}':>10}" for stage in STAGES))
    failed = 0
    with RankPool(ranks, quiet=True) as pool:  # nothing of theirs in the table
        for row in rows:
            console.print(f"{row.title:{NAME_WIDTH}}{steps or row.steps:6}", end="")
            failed += _run(subject, row, steps or row.steps, pool, console)
    console.print(
        "[green]all the same[/]"
        if not failed
        else f"[red]{failed} {'run differs' if failed == 1 else 'runs differ'}[/]"
    )
    if left_out:
        console.print(f"left out, with {ranks} ranks: " + "; ".join(row.title for row in left_out))
    return 1 if failed else 0


main = command_line(check, "zeroshard check")


def _chosen(rows: tuple[Row, ...], only: str | None) -> tuple[Row, ...]:
    chosen = tuple(row for row in rows if only is None or only.lower() in row.title.lower())
    if not chosen:
        titles = "; ".join(row.title for row in rows)
        raise typer.BadParameter(f"no row's name contains {only!r}. They are {titles}", param_hint="--only")
    return chosen


def _run(subject: Subject, row: Row, steps: int, pool: RankPool, console: Console) -> int:
    """One line of the table, stage by stage; how many of them differ."""
    failed = 0
    for stage in STAGES:
        if stage not in row.stages:
            console.print(f"{'-':>10}", end="")
            continue
        difference = measure_parity(
            subject.build,
            subject.batch,
            {**row.config, **_at(stage, row.zero)},
            steps=steps,
            pool=pool,
            timeout=subject.timeout,
            loop=row.loop,
        ).relative
        good = difference <= FP32_TOLERANCE
        failed += not good
        console.print(f"{difference:10.1e}" if good else f"[red]{difference:10.1e}[/]", end="")
    console.print("  [red]DIFFERENT[/]" if failed else "  [green]same[/]")
    return failed


def _at(stage: int, zero: Mapping[str, Any]) -> dict[str, Any]:
    return {
        # Then 16 bit is compared to the last bits too: rounding on the wire would hide an error of its size.
        "communication_data_type": "fp32",
        # Everything that stage 3 can do happens: nothing persists, nothing is kept for reuse.
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            **zero,
        },
    }
