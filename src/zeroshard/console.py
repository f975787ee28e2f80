"""Command lines and tables, for people and for pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zeroshard.errors import ConfigError, LaunchError, ZeroShardError
from zeroshard.interrupts import INTERRUPTED

__all__ = ["command_line", "guarded", "run_parsed", "show_table"]


def command_line(command: Callable[..., Any], name: str) -> Callable[..., int]:
    """The command line of one function, whose docstring is its help: from words to an exit status.

    It may also be called by another `name`, which its help and messages then have.
    """

    def run(words: Sequence[str], name: str = name) -> int:
        import typer

        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command()(command)
        return run_parsed(app, name, words)

    return run


def run_parsed(app: Any, name: str, words: Sequence[str]) -> int:
    """Run what `app`, of typer, has for these words; the exit status.

    Not by calling it: that catches a Ctrl-C, too.
    """
    import typer

    command = typer.main.get_command(app)
    with command.make_context(name, list(words)) as context:
        status = command.invoke(context)
    return status if isinstance(status, int) else 0


def guarded(command: Callable[[], Any], name: str) -> int:
    """Run a command and return its exit status; an error that is known is one line on stderr.

    2 is a mistake in the command line or a config, 1 another error, 130 Ctrl-C.
    """
    import typer

    _open_standard_streams()
    # The common base of everything the parser raises. Typer has it from click, or from its own copy of click.
    wrong: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    try:
        status = command()
        sys.stdout.flush()
    except (ZeroShardError, wrong) as error:
        print(f"{name}: {error.format_message() if isinstance(error, wrong) else error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, LaunchError, wrong)) else 1
    except (typer.Abort, KeyboardInterrupt):
        print(f"{name}: stopped by SIGINT", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads any more; nor is anybody to be told so when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{name}: {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
        return 1
    except (SystemExit, typer.Exit) as ended:
        status = ended.code if isinstance(ended, SystemExit) else ended.exit_code
    return status if isinstance(status, int) else 0


def _open_standard_streams() -> None:
    """Put /dev/null where who started us has closed stdin, stdout or stderr.

    Another file would take its number, and what we start would have that for its own.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


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
