"""Every hook that a plugin may implement. docs/hooks.md describes each; a test holds the two together.

A plugin is a module named by an entry point of the group `kvbench`:

    [project.entry-points.kvbench]
    mine = "my_package.plugin"

All hooks collect: they return values, mutate nothing, and the order of plugins never matters. Plugin modules hold
strings only and import neither torch nor the code they announce. Nothing on the per-token path is a hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvbench.entries import ModelEntry, PolicyEntry, TaskEntry

PROJECT = "kvbench"
"""Name of the pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = ["PROJECT", "hookimpl", "kvbench_models", "kvbench_policies", "kvbench_tasks"]


@hookspec
def kvbench_policies() -> Iterable[PolicyEntry]:  # type: ignore[empty-body]  # a specification has no body
    """Return the policies of this plugin. Called once, when the registry is built."""


@hookspec
def kvbench_tasks() -> Iterable[TaskEntry]:  # type: ignore[empty-body]  # a specification has no body
    """Return the tasks of this plugin. Called once, when the registry is built."""


@hookspec
def kvbench_models() -> Iterable[ModelEntry]:  # type: ignore[empty-body]  # a specification has no body
    """Return the named models of this plugin. Called once, when the registry is built."""
