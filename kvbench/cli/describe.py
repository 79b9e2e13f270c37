"""`kvbench describe`: everything the registry knows about one name."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.core.errors import canonical, unknown_name
from kvbench.entries import Entry, ModelEntry, PolicyEntry, TaskEntry
from kvbench.plugins import Registry, load_registry

_NEEDS = {
    "queries": "queries",
    "attention": "attention weights",
    "hidden": "hidden states",
    "future": "the future (an oracle)",
}


def describe(
    name: Annotated[str, typer.Argument(help="A policy, a task or a model.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Describe a policy, a task or a model: where it comes from, what it needs, which parameters it has."""
    registry = load_registry()
    found = _found(registry, name)
    if as_json:
        records = [
            {"kind": kind, **dataclasses.asdict(entry), "distribution": registry.origins[kind, entry.name]}
            for kind, entry in found
        ]
        print(json.dumps(records, indent=2))
        return
    console = Console()
    for kind, entry in found:
        _print(console, kind, entry, registry.origins[kind, entry.name])


def _found(registry: Registry, name: str) -> list[tuple[str, Entry]]:
    """Every entry of that name: nothing forbids a task to be called like a model."""
    everything = registry.by_kind()
    found = [(kind, entries[canonical(name)]) for kind, entries in everything.items() if canonical(name) in entries]
    if not found:
        raise unknown_name("policy, task or model", name, (n for entries in everything.values() for n in entries))
    return found


def _print(console: Console, kind: str, entry: Entry, distribution: str) -> None:
    console.print(f"[bold]{entry.name}[/bold] ({kind}): {escape(entry.summary)}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for label, value in [*_facts(entry), ("target", entry.target), ("distribution", distribution)]:
        table.add_row(label, escape(value))
    console.print(table)
    if isinstance(entry, PolicyEntry) and entry.parameters:
        console.print(_parameters(entry))


def _facts(entry: Entry) -> list[tuple[str, str]]:
    match entry:
        case PolicyEntry():
            return [
                ("paper", entry.paper or "none: a control"),
                ("needs", ", ".join(_NEEDS[need] for need in entry.needs) or "nothing but keys and values"),
                ("learned", "yes: needs a checkpoint for the model" if entry.learned else "no"),
                ("trainable", f"yes: kvbench train --policy {entry.name}" if entry.trainable else "no"),
                ("prefill", entry.prefill),
                ("hard budget", "yes" if entry.hard_budget else "no: never ranked as if bounded"),
                ("positions", entry.positions),
            ]
        case TaskEntry():
            return [
                ("source", entry.paper or "generated, with an independent interpreter"),
                ("data set", entry.data or "none"),
                ("held out", "yes: no policy has been trained on it" if entry.held_out else "no"),
            ]
        case ModelEntry():
            return [("licence", entry.licence)]
        case _:
            return []


def _parameters(entry: PolicyEntry) -> Table:
    table = Table(title="parameters (--policy-arg name=value)", title_justify="left", box=None, padding=(0, 2, 0, 2))
    for heading in ("name", "type", "default", ""):
        table.add_column(heading)
    for parameter in entry.parameters:
        table.add_row(*map(escape, parameter))
    return table
