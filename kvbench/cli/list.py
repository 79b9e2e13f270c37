"""`kvbench list`: the names that the other commands take."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.core.errors import unknown_name
from kvbench.entries import Entry, PolicyEntry, TaskEntry
from kvbench.plugins import Registry, load_registry

SINGULAR = {"policies": "policy", "tasks": "task", "models": "model"}


def list_entries(
    what: Annotated[
        str | None, typer.Argument(help="policies, tasks or models; all if left out.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """List policies, tasks and models, those of installed plugins included."""
    if what is not None and what not in SINGULAR:
        raise unknown_name("list", what, SINGULAR)
    registry = load_registry()
    chosen = [what] if what else list(SINGULAR)
    if as_json:
        print(json.dumps({plural: _records(registry, SINGULAR[plural]) for plural in chosen}, indent=2))
        return
    console = Console()
    for plural in chosen:
        console.print(_table(plural, registry.by_kind()[SINGULAR[plural]]))


def _records(registry: Registry, kind: str) -> list[dict[str, object]]:
    return [
        {**dataclasses.asdict(entry), "distribution": registry.origins[kind, name]}
        for name, entry in registry.by_kind()[kind].items()
    ]


def _table(title: str, entries: Mapping[str, Entry]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, entry in entries.items():
        table.add_row(f"[bold]{name}[/bold]", escape(entry.summary) + _remark(entry))
    return table


def _remark(entry: Entry) -> str:
    if isinstance(entry, PolicyEntry) and entry.learned:
        return " [dim](learned)[/dim]"
    if isinstance(entry, TaskEntry) and entry.held_out:
        return " [dim](held out)[/dim]"
    return ""
