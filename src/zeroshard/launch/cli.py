"""The `zeroshard` command: a table of commands, of which most live in other modules and wings.

Nothing heavy is imported until a command needs it, so `zeroshard --help` answers at once. Every mistake on
the command line is one line on stderr and exit status 2.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

import zeroshard
from zeroshard.console import guarded, run_parsed
from zeroshard.interrupts import raise_again
from zeroshard.launch.processes import hangup_stays_ignored

__all__ = ["app", "main", "run_under"]

app = typer.Typer(
    name="zeroshard",
    help="ZeRO training for PyTorch: the DeepSpeed config and calls.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zeroshard {zeroshard.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def config(
    file: Annotated[Path | None, typer.Argument(help="DeepSpeed JSON file to check.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key and what uses it.")] = False,
) -> int:
    """Check a config file, or list every config key."""
    if file is None and not keys:
        raise typer.BadParameter("give a file to check, or --keys", param_hint="FILE")
    from zeroshard.launch import config_command

    if keys:
        config_command.list_keys()
    if file is not None:
        config_command.explain_file(file)
    return 0


class _Elsewhere(NamedTuple):
    """A command that lives in another wing: `main(arguments) -> exit status` of a module, or what is named."""

    home: str
    help: str


# Named, not imported: wings do not import each other, and the command that is not run costs nothing.
ELSEWHERE = {
    "run": _Elsewhere(
        "zeroshard.launch.command:run", "Run a script on all ranks, of one machine or of many."
    ),
    "inspect": _Elsewhere("zeroshard.checkpoint.commands:inspect", "List what is in a checkpoint."),
    "verify": _Elsewhere(
        "zeroshard.checkpoint.commands:verify", "Read all of a checkpoint; compare checksums."
    ),
    "export": _Elsewhere("zeroshard.checkpoint.commands:export", "Write weights for other programs."),
    "check": _Elsewhere("zeroshard.planner.check", "Train a model here and in plain PyTorch; compare."),
    "report": _Elsewhere(
        "zeroshard.report.command", "Show versions, devices, fast paths and limits of this machine."
    ),
    "bench": _Elsewhere(
        "zeroshard.bench.command", "Measure time and bandwidth of collectives between ranks."
    ),
    "estimate": _Elsewhere(
        "zeroshard.planner.estimate", "Print what a model takes on each rank, before the run."
    ),
    "explain": _Elsewhere("zeroshard.planner.explain", "Show the planned schedule as a time line."),
}


def _begin(name: str) -> Callable[..., int]:
    """The function of a command of `ELSEWHERE`. From here on Ctrl-C is an exception, for it to put things away."""
    module, _, function = ELSEWHERE[name].home.partition(":")
    found: Callable[..., int] = getattr(importlib.import_module(module), function or "main")
    raise_again()
    return found


def _add_elsewhere(name: str, command: _Elsewhere) -> None:
    def forward(context: typer.Context) -> int:
        return _begin(name)(context.args)

    # The other wing parses its own options, `--help` included.
    app.command(
        name,
        help=command.help,
        add_help_option=False,
        context_settings={
            "ignore_unknown_options": True,
            "allow_extra_args": True,
            "allow_interspersed_args": False,  # a `--` among the script's words is the script's
        },
    )(forward)


for _name, _command in ELSEWHERE.items():
    _add_elsewhere(_name, _command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    with hangup_stays_ignored():
        return guarded(lambda: run_parsed(app, "zeroshard", words or ["--help"]), "zeroshard")


def run_under(name: str, command: str, words: Sequence[str], **more: object) -> int:
    """Run a command of `ELSEWHERE` that goes by another name in its help and messages."""
    with hangup_stays_ignored():
        return guarded(lambda: _begin(command)(words, name=name, **more), name)
