"""Command lines and tables, for people and for pipes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zeroshard.errors import ConfigError, LaunchError, ZeroShardError

__all__ = ["command_line", "guarded", "show_table"]


def command_line(command: Callable[..., Any], name: str) -> Callable[[Sequence[str]], int]:
    """The command line of one function, whose docstring is its help: from words to an exit status."""

    def run(words: Sequence[str]) -> int:
        import typer

        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command()(command)
        status = app(list(words), prog_name=name, standalone_mode=False)
        return status if isinstance(status, int) else 0

    return run


def guarded(command: Callable[[], Any], name: str) -> int:
    """Run a command and return its exit status; an error that is known is one line on stderr.

    2 is a mistake in the command line or a config, 1 another error, 130 Ctrl-C.
    """
    import typer

    # The common base of everything the parser raises. Typer has it from click, or from its own copy of click.
    wrong: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    try:
        status = command()
    except (ZeroShardError, wrong) as error:
        print(f"{name}: {error.format_message() if isinstance(error, wrong) else error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, LaunchError, wrong)) else 1
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except SystemExit as ended:
        status = ended.code
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
