"""Announces them: strings only."""

from __future__ import annotations

from kvbench.entries import Parameter, PolicyEntry, TaskEntry
from kvbench.hookspecs import hookimpl


@hookimpl
def kvbench_policies() -> list[PolicyEntry]:
    return [
        PolicyEntry(
            name="demo_oldest",
            target="kvbench_demo.oldest:DemoOldest",
            summary="keeps the oldest tokens",
            parameters=(Parameter("window", "int", "4", "newest tokens that stay"),),
        )
    ]


@hookimpl
def kvbench_tasks() -> list[TaskEntry]:
    return [
        TaskEntry(
            name="demo_addition",
            target="kvbench_demo.addition:DemoAddition",
            summary="one addition modulo 1000",
        )
    ]
