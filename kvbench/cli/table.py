"""`kvbench table`: stored rows as a table."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvbench.core.errors import KvbenchError, canonical
from kvbench.efficiency.record import ROWS, read_rows


class Format(StrEnum):
    """What `kvbench table` can write."""

    text = "text"
    md = "md"
    csv = "csv"
    json = "json"


def table(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of 'kvbench run', or of 'kvbench efficiency'.")
    ],
    form: Annotated[
        Format, typer.Option("--format", help="text and md: a summary; csv and json: one row a cell.")
    ] = Format.text,
    gen_len: Annotated[list[int] | None, typer.Option("--gen-len", help="Only these generation lengths.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only these tasks.")] = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", help="pass@k for this k; as many as there are samples if left out.")
    ] = None,
) -> None:
    """Show the rows of one or more runs: relative scores are paired with the dense rows of all folders.

    Example: kvbench table kvbench-runs --format json
    """
    if any((folder / ROWS).is_file() for folder in folders):
        _efficiency(folders, form, gen_len)
        return
    from kvbench.report.load import load
    from kvbench.report.tables import only, render, show

    ks = tuple(sorted(set(k or ())))
    if ks and ks[0] < 1:
        raise KvbenchError(f"--k is {ks[0]}; it has to be at least 1.")
    stored = load(folders)
    if gen_len or task:
        tasks = {canonical(name) for name in task or ()}
        kept = (
            r for r in stored.rows if r.gen_length in (gen_len or (r.gen_length,)) and r.task in (tasks or {r.task})
        )
        stored = only(stored, {row.key for row in kept})
        if not stored.rows:
            raise KvbenchError("None of the rows has that task or generation length.")
    console = Console()
    if form is Format.text and console.is_terminal:
        show(stored, console, ks)
        return
    sys.stdout.write(render(stored, form.value, ks))


def _efficiency(folders: list[Path], form: Format, gen_len: list[int] | None) -> None:
    """Rows of cost; folders with and without them do not mix."""
    from kvbench.efficiency.tables import render, show

    # Of several measurements of one cell the last folder's counts.
    found = {row.key: row for folder in folders for row in read_rows(folder)}
    rows = [row for row in found.values() if not gen_len or row.cell.gen_length in gen_len]
    if not rows:
        raise KvbenchError("None of the rows has that generation length.")
    console = Console()
    if form is Format.text and console.is_terminal:
        show(rows, console)
        return
    sys.stdout.write(render(rows, form.value))
