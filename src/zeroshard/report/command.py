"""`zeroshard report`: one screen, or JSON. No process group, and no probe that fails can make it fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from zeroshard.console import run_command
from zeroshard.report import machine, software

__all__ = ["collect", "main"]

FORMAT = 1
"""Of the JSON: grows when a name goes or changes its meaning, not when one comes."""
_GIGA, _MEGA = 1e9, 1e6

PROBES: dict[str, Callable[[], Any]] = {
    "versions": software.versions,
    "devices": software.devices,
    "backends": software.backends,
    "memory": machine.memory,
    "shared memory": machine.shared_memory,
    "cores": machine.cores,
    "numa": machine.numa_nodes,
    "limits": machine.limits,
    "environment": software.environment,
}


def main(arguments: Sequence[str], name: str = "zeroshard report") -> int:
    """Run the command line; the exit status."""
    about = "Print versions, devices, backends, fast paths, memory and limits of this machine."
    return run_command(_command, name, arguments, about)


def _command(
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON; sizes in bytes.")] = False,
) -> int:
    told = collect()
    print(json.dumps(told, indent=2) if as_json else "\n".join(_as_text(told)))
    return 0


def collect() -> dict[str, Any]:
    """Everything by section. What could not be found out is None, and a line of `problems` says why; a fast path
    that cannot be asked is off, for that reason."""
    told: dict[str, Any] = {"format": FORMAT}
    problems = []
    for section, question in PROBES.items():
        told[section], why = _ask(question)
        if why:
            problems.append({"section": section, "why": why})
    told["fast paths"] = {}
    for name, path in software.FAST_PATHS.items():
        found, why = _ask(path)
        on, reason = found or (False, why)
        told["fast paths"][name] = {"on": on, "why": reason}
    told["problems"] = problems
    return told


def _ask(question: Callable[[], Any]) -> tuple[Any, str]:
    """The answer, or None and why there is none."""
    try:
        return question(), ""
    except Exception as error:  # a machine that lacks something is what a report is for
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text}"


def _as_text(told: Mapping[str, Any]) -> list[str]:
    lines = [*_software(told), ""]
    for name, path in told["fast paths"].items():
        lines.append(f"{'on' if path['on'] else 'off':5}{name:38}{path['why']}".rstrip())
    lines += ["", *_machine(told)]
    variables = [f"{name}={value}" for name, value in (told["environment"] or {}).items()]
    lines.append(_line("environment", ", ".join(variables) or "nothing is set that matters to a run"))
    lines += [_line("problem", f"{problem['section']}: {problem['why']}") for problem in told["problems"]]
    return lines


def _line(name: str, text: str) -> str:
    return f"{name:13}{text}"


def _software(told: Mapping[str, Any]) -> list[str]:
    versions = dict(told["versions"] or {})
    first = ("zeroshard", "python", "torch")
    system = versions.pop("system", None)
    there = [f"{name} {version}" for name, version in versions.items() if version and name not in first]
    missing = [name for name, version in versions.items() if version is None]
    lines = [
        ", ".join([f"{name} {versions[name]}" for name in first if versions.get(name)] + [f"{system}"]),
        _line("with", ", ".join(there) or "-"),
        _line("without", ", ".join(missing) or "-"),
    ]
    devices = told["devices"] or []
    for index, device in enumerate(devices):
        memory = "" if device["memory"] is None else f", {device['memory'] / _GIGA:.1f} GB"
        lines.append(_line("device", f"{device['type']}:{index} {device['name']}{memory}"))
    if not devices:
        lines.append(_line("devices", "no accelerator: ranks run on the CPU"))
    backends = told["backends"] or {}
    usable = [f"{name} ({b['why']})" if b["why"] else name for name, b in backends.items() if b["available"]]
    absent = [f"{name}" for name, b in backends.items() if not b["available"]]
    lines.append(_line("backends", ", ".join(usable) or "none"))
    if absent:
        reasons = {backends[name]["why"] for name in absent}
        lines.append(_line("", f"not {', '.join(absent)}: {'; '.join(sorted(reasons))}"))
    return lines


def _machine(told: Mapping[str, Any]) -> list[str]:
    lines = []
    memory = told["memory"]
    if memory is not None:
        text = f"{_size(memory['total'])}, {_size(memory['available'])} available, swap {_size(memory['swap'])}; "
        if memory["group limit"] is None:
            text += "no limit by a control group"
        else:
            text += f"control group: {_size(memory['group used'])} used of {_size(memory['group limit'])}"
        lines.append(_line("memory", text))
    shared = told["shared memory"]
    if shared is not None:
        text = f"{_size(shared['size'])}, {_size(shared['free'])} free; workers of a DataLoader and NCCL need it, "
        lines.append(_line("/dev/shm", text + "zeroshard's own collectives do not"))
    cores = told["cores"]
    if cores is not None:
        allowed = cores["allowed"]
        text = f"{cores['logical']} ({cores['model'] or 'model not told'})"
        text += "" if allowed is None else f", this process may use {len(allowed)}: {_ranges(allowed)}"
        quota = cores["group quota"]
        lines.append(_line("cores", text + ("" if quota is None else f"; the control group gives {quota:g}")))
    nodes = told["numa"]
    if nodes is not None:
        each = [f"{n['node']}: cores {n['cores']}, {_size(n['memory'])}" for n in nodes]
        lines.append(_line("NUMA", "; ".join(each) or "not told by the system"))
    if told["limits"] is not None:
        each = [f"{name} {_limit(name, limit['soft'])}" for name, limit in told["limits"].items()]
        lines.append(_line("limits", ", ".join(each)))
    return lines


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "unknown"
    return f"{nbytes / _GIGA:.1f} GB" if nbytes >= _GIGA else f"{nbytes / _MEGA:.1f} MB"


def _limit(name: str, value: int | None) -> str:
    if value is None:
        return "unlimited"
    return str(value) if name in ("open files", "processes") else _size(value)


def _ranges(numbers: Sequence[int]) -> str:
    """0-3,8 of 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
