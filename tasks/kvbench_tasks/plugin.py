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
            summary="run a recurrence whose coefficients were given once, long ago",
        ),
        TaskEntry(
            name="codebook",
            target="kvbench_tasks.codebook:Codebook",
            summary="translate a long message with a code book given at the start",
        ),
        TaskEntry(
            name="ledger",
            target="kvbench_tasks.ledger:Ledger",
            summary="keep accounts whose balances are asked for again much later",
            held_out=True,
        ),
        TaskEntry(
            name="program",
            target="kvbench_tasks.program:Program",
            summary="trace a program whose variables are read long after they were set",
        ),
        TaskEntry(
            name="chain",
            target="kvbench_tasks.chain:Chain",
            summary="follow links from one definition to the next",
        ),
        TaskEntry(
            name="stack",
            target="kvbench_tasks.stack:Stack",
            summary="push and pop: what comes back was put down long ago",
        ),
    ]
