"""`zeroshard estimate`: what a run takes on a rank, from the layout that the run will have.

Nothing is allocated: the engine is built over fake tensors. DeepSpeed's figures, which are formulas, stand beside
ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from zeroshard.config import RawConfig, parse, read_config
from zeroshard.console import command_line
from zeroshard.memory import CATEGORIES, MemoryBill
from zeroshard.planner import estimators
from zeroshard.planner.rehearsal import rehearse
from zeroshard.planner.subjects import factory_of, layers_of
from zeroshard.precision import DTYPES

__all__ = ["Estimate", "estimate", "main"]

STAGES = (0, 1, 2, 3)
_OFFLOADS = ("offload_optimizer", "offload_param")
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_MOST_PARAMETERS = 10**17
"""Of which torch can still number the bytes, optimizer state and all."""
_NOT_YET = "zeroshard does not offload yet"
_ASSUMED = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "micro_batch_size": 1,
    "accumulation_steps": 1,
    "max_steps": 1,
    "warmup_steps": 0,
    "precision": "bf16",
}
"""For "auto" in a config. Of these only the accumulation steps and the precision count, and they are printed."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one stage takes, in bytes."""

    stage: int
    ranks: int
    dtype: str
    optimizer: str
    accumulation_steps: int
    parameters: int
    """Of the model: a number of elements."""
    largest_layer: int
    bill: MemoryBill
    """Of rank 0, whose shard holds the least padding."""
    module_buffers: int
    """On every rank."""

    @property
    def total(self) -> int:
        return self.bill.total + self.module_buffers


def estimate(build: Callable[[], nn.Module], raw: Mapping[str, Any] | RawConfig, ranks: int) -> Estimate:
    """The bill of the model that `build` returns, under the config `raw`, on `ranks` ranks.

    `build` runs with fake tensors. Raises ConfigError or ModelError as `initialize` does.
    """
    with rehearse(build, raw, ranks, **_ASSUMED) as engine:
        parameters, largest = estimators.sizes_of(engine.module)
        _, _, steps = engine.get_batch_info()
        optimizer = engine.optimizer
        return Estimate(
            stage=engine.policy.stage,
            ranks=ranks,
            dtype=engine.config.compute_dtype,
            optimizer="none" if optimizer is None else type(optimizer).__name__,
            accumulation_steps=steps,
            parameters=parameters,
            largest_layer=largest,
            bill=engine.predicted_memory(),
            module_buffers=sum(buffer.nbytes for buffer in engine.module.buffers()),
        )


def _number(text: str, option: str) -> int:
    try:
        value = float(text)
        if 1 <= value <= _MOST_PARAMETERS and value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(
        f"{text!r} is not a whole number from 1 to {_MOST_PARAMETERS:.0e}, such as 7e9", param_hint=option
    )


def _command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="module:function that builds it, or a Hugging Face config.json or its directory."
        ),
    ] = None,
    params: Annotated[
        str | None, typer.Option(metavar="N", help="Without a model: how many parameters, such as 7e9.")
    ] = None,
    largest_layer: Annotated[
        str | None, typer.Option(metavar="N", help="With --params: how many of them in the largest layer.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="DeepSpeed JSON file: its stage and settings.", show_default=False)
    ] = None,
    stage: Annotated[
        list[int] | None, typer.Option(min=0, max=3, help="Default: the config's, or all four.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16. Default: the config's, or bf16.")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", min=1, max=1_000_000, help="Ranks on each node.")
    ] = 8,
    nodes: Annotated[int, typer.Option(min=1, max=1_000_000, help="Nodes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON, in bytes.")] = False,
) -> int:
    """Print what a model takes on each rank at ZeRO stages 0 to 3, counted from the layout, with DeepSpeed's
    estimates beside it. Activations are not included. Nothing is allocated."""
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(DTYPES)}", param_hint="--dtype")
    build = _subject(model, params, largest_layer)
    raw, wished = _settings(config, dtype)
    stages = stage or ([raw.data["zero_optimization"].get("stage", 0)] if config is not None else STAGES)
    rows = [estimate(build, _at(raw, number), ranks * nodes) for number in dict.fromkeys(stages)]
    name = model or f"{params} parameters"
    if as_json:
        print(json.dumps(_as_data(name, rows, ranks, nodes, wished), indent=2))
    else:
        print("\n".join(_as_text(name, rows, ranks, nodes, wished)))
    return 0


main = command_line(_command, "zeroshard estimate")


def _subject(model: str | None, params: str | None, largest: str | None) -> Callable[[], nn.Module]:
    if (model is None) == (params is None):
        raise typer.BadParameter("give either a model, or --params and --largest-layer", param_hint="MODEL")
    if (params is None) != (largest is None):
        raise typer.BadParameter("--params and --largest-layer go together", param_hint="--largest-layer")
    if model is not None:
        return factory_of(model)
    assert params is not None
    assert largest is not None
    return layers_of(_number(params, "--params"), _number(largest, "--largest-layer"))


def _settings(file: Path | None, dtype: str | None) -> tuple[RawConfig, list[str]]:
    """The config to estimate with, and what it wants to offload: offload is left out of it."""
    read = RawConfig(data={}, source="dict") if file is None else read_config(file)
    if not isinstance(read.data.get("zero_optimization", {}), Mapping):
        parse(read)  # says what is wrong with it
    raw: dict[str, Any] = deepcopy(dict(read.data))
    zero = raw["zero_optimization"] = dict(raw.get("zero_optimization") or {})
    wished = []
    for key in _OFFLOADS:
        section = zero.pop(key, None)
        if isinstance(section, Mapping) and section.get("device", "none") not in ("none", None):
            wished.append(f"{key}={section['device']}")
    if raw.get("train_batch_size") == "auto":
        raw.setdefault("train_micro_batch_size_per_gpu", "auto")
    raw.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-3}})
    sections = {section for section in ("bf16", "bfloat16", "fp16") if section in raw}
    if dtype is not None or not sections:
        for section in sections:
            del raw[section]
        if dtype != "fp32":
            raw[dtype or "bf16"] = {"enabled": True}
    return RawConfig(data=raw, source=read.source), wished


def _at(raw: RawConfig, stage: int) -> RawConfig:
    zero = {**raw.data["zero_optimization"], "stage": stage}
    return RawConfig(data={**raw.data, "zero_optimization": zero}, source=raw.source)


def _deepspeed(row: Estimate, ranks: int, nodes: int, *offloaded: str) -> tuple[int, int] | None:
    """DeepSpeed's estimate (host memory of a node, memory of a device); None where it has none."""
    optimizer, parameters = (key in offloaded for key in _OFFLOADS)
    if row.stage == 2 and not parameters:
        return estimators.estimate_zero2_model_states_mem_needs(row.parameters, ranks, nodes, optimizer)
    if row.stage == 3 and (optimizer or not parameters):
        host, device, _ = estimators.estimate_zero3_model_states_mem_needs(
            row.parameters, row.largest_layer, ranks, nodes, optimizer, parameters
        )
        return host, device
    return None


def _offloads(
    rows: Sequence[Estimate], ranks: int, nodes: int
) -> list[tuple[int, tuple[str, ...], int, int]]:
    """(stage, what is offloaded, DeepSpeed's bytes of a device, of a node's host memory)."""
    found: list[tuple[int, tuple[str, ...], int, int]] = []
    for row in rows:
        for offloaded in (_OFFLOADS[:1], _OFFLOADS):
            known = _deepspeed(row, ranks, nodes, *offloaded)
            if known is not None:
                found.append((row.stage, offloaded, known[1], known[0]))
    return found


def _as_data(
    name: str, rows: Sequence[Estimate], ranks: int, nodes: int, wished: Sequence[str]
) -> dict[str, Any]:
    stages = []
    for row in rows:
        known = _deepspeed(row, ranks, nodes)
        stages.append(
            {
                "stage": row.stage,
                "zeroshard": {
                    **dict(row.bill.rows()),
                    "module buffers": row.module_buffers,
                    "total": row.total,
                    "padding": row.bill.padding,
                },
                "deepspeed": None if known is None else {"device": known[1], "host": known[0]},
            }
        )
    first = rows[0]
    return {
        "model": name,
        "parameters": first.parameters,
        "largest_layer": first.largest_layer,
        "ranks_per_node": ranks,
        "nodes": nodes,
        "dtype": first.dtype,
        "optimizer": first.optimizer,
        "accumulation_steps": first.accumulation_steps,
        "stages": stages,
        "offload": [
            {"stage": stage, "offloaded": list(what), "zeroshard": None, "why": _NOT_YET}
            | {"deepspeed": {"device": device, "host": host}}
            for stage, what, device, host in _offloads(rows, ranks, nodes)
        ],
        "asked_for": list(wished),
    }


def _as_text(name: str, rows: Sequence[Estimate], ranks: int, nodes: int, wished: Sequence[str]) -> list[str]:
    first = rows[0]
    known = [_deepspeed(row, ranks, nodes) for row in rows]
    offloads = _offloads(rows, ranks, nodes)
    totals = [row.total for row in rows]
    formulas = [two for two in known if two is not None] + [two for _, _, *two in offloads]
    largest = max(totals + [max(two) for two in formulas])
    unit, size = next((unit, size) for unit, size in _UNITS if largest >= size or size == 1e3)
    width = max(12, len(f"{largest / size:,.3f}") + 2)

    def line(title: str, values: Sequence[int | None], unknown: str = "-") -> str:
        cells = (f"{unknown if value is None else f'{value / size:,.3f}':>{width}}" for value in values)
        return f"{title:30}" + "".join(cells)

    lines = [
        f"{name}: {first.parameters:,} parameters, {first.largest_layer:,} in the largest layer",
        f"{ranks * nodes} ranks ({nodes} x {ranks}), {first.dtype}, {first.optimizer}, "
        f"{first.accumulation_steps} micro-batch(es) per step; {unit} = {size:g} bytes",
        "",
        f"{'on each rank':30}" + "".join(f"{f'stage {row.stage}':>{width}}" for row in rows),
    ]
    for index, category in enumerate(CATEGORIES):
        lines.append(line(category, [row.bill.rows()[index][1] for row in rows], "unknown"))
    lines += [
        line("module buffers", [row.module_buffers for row in rows]),
        line(f"zeroshard, {unit}", [row.total for row in rows]),
        line("DeepSpeed's formula, device", [None if two is None else two[1] for two in known]),
        line("DeepSpeed's formula, host/node", [None if two is None else two[0] for two in known]),
        "",
        "Of the two peaks the larger one counts, since they are not at the same time. What is gathered at once",
        "follows the order of definition: weights used again elsewhere (a tied head) add to it. So do activations.",
    ]
    if offloads:
        lines += ["", f"with offload: {_NOT_YET}, so these are DeepSpeed's formulas alone"]
        lines.append(f"{'':46}{'device':>{width}}{'host/node':>{width}}")
    for stage, what, device, host in offloads:
        title = f"stage {stage}, {', '.join(what)}"
        lines.append(f"{title:46}{f'{device / size:,.3f}':>{width}}{f'{host / size:,.3f}':>{width}}")
    if wished:
        lines.append(
            f"The config asks for {', '.join(wished)}: {_NOT_YET}; zeroshard's figures are without it."
        )
    return lines
