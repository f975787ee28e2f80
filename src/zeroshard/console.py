"""Command lines and tables, for people and for pipes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zeroshard.errors import ConfigError, ZeroShardError

__all__ = ["run_command", "run_typer", "show_table"]


def run_command(command: Callable[..., Any], name: str, arguments: Sequence[str]) -> int:
    """Run the command line of one function; see `run_typer`."""
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    return run_typer(app, name, arguments)


def run_typer(app: Any, name: str, arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; every mistake is one line on stderr.

    2 is a mistake in the command line or a config, 1 another error that is known, 130 Ctrl-C.
    """
    import typer

    # The common base of everything the parser raises. Typer has it from click, or from its own copy of click.
    wrong: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    try:
        status = app(list(arguments), prog_name=name, standalone_mode=False)
    except (ConfigError, ZeroShardError, wrong) as error:
        message = error.format_message() if isinstance(error, wrong) else error
        print(f"{name.partition(' ')[0]}: {message}", file=sys.stderr)
        return 1 if isinstance(error, ZeroShardError) and not isinstance(error, ConfigError) else 2
    except typer.Abort:
        return 130
    return status if isinstance(status, int) else 0


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in a terminal; lines with tabs, without the header, where another program reads."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
