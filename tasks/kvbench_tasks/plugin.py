"""Announces the tasks of this package: strings only, nothing here imports torch."""

from __future__ import annotations

from kvbench.entries import TaskEntry
from kvbench.hookspecs import hookimpl


@hookimpl
def kvbench_tasks() -> list[TaskEntry]:
    """Return the tasks of this package."""
    return [
        TaskEntry(
            name="recurrence",
            target="kvbench_tasks.recurrence:Recurrence",
            summary="a ring of registers: each step adds the last result to the next register",
        ),
        TaskEntry(
            name="codebook",
            target="kvbench_tasks.codebook:Codebook",
            summary="a table in the prompt: the first digit of a running sum says which entry is added",
        ),
        TaskEntry(
            name="ledger",
            target="kvbench_tasks.ledger:Ledger",
            summary="accounts posted into each other: every balance is asked for at the end",
            held_out=True,
        ),
        TaskEntry(
            name="program",
            target="kvbench_tasks.program:Program",
            summary="a loop of additions is carried out line by line",
        ),
        TaskEntry(
            name="chain",
            target="kvbench_tasks.chain:Chain",
            summary="a walk along the pointers of a cycle of nodes adds up their weights",
        ),
        TaskEntry(
            name="stack",
            target="kvbench_tasks.stack:Stack",
            summary="values are pushed one after another, then added up from the top down",
        ),
    ]
