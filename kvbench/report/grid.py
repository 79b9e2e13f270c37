"""A table on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_grid(console: Console, title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a titled table without lines; the first column names the row."""
    console.print(f"\n{title}", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, name in enumerate(heading):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index > 0, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
