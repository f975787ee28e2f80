"""Tables for people and for pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

__all__ = ["show_table"]


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
