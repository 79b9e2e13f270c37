"""`kvbench table`: stored rows as a table."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Format(StrEnum):
    """What `kvbench table` can write."""

    text = "text"
    md = "md"
    csv = "csv"
    json = "json"


def table(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of 'kvbench run', shards together.")],
    form: Annotated[
        Format, typer.Option("--format", help="text and md: a summary; csv and json: one row a cell.")
    ] = Format.text,
) -> None:
    """Show the rows of one or more runs: relative scores are paired with the dense rows of all folders.

    Example: kvbench table kvbench-runs --format json
    """
    from kvbench.report.load import load
    from kvbench.report.tables import render, show

    stored = load(folders)
    console = Console()
    if form is Format.text and console.is_terminal:
        show(stored, console)
        return
    sys.stdout.write(render(stored, form.value))
