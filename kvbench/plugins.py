"""The registry: every policy, task and model that an installed distribution announces.

Entry points of the group `kvbench` are loaded one by one. A mistake in kvbench's own plugins raises. A mistake in
anybody else's takes that plugin out, is kept in `Registry.broken`, and everything else works.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import pluggy

from kvbench import hookspecs
from kvbench.core.errors import KvbenchError, canonical, unknown_name
from kvbench.entries import Entry, ModelEntry, PolicyEntry, TaskEntry

OWN = "kvbench"
"""The distribution whose plugins must work."""

HOOKS: Mapping[str, tuple[str, type[Entry]]] = MappingProxyType(
    {
        "kvbench_policies": ("policy", PolicyEntry),
        "kvbench_tasks": ("task", TaskEntry),
        "kvbench_models": ("model", ModelEntry),
    }
)
"""Hook -> what it collects, in the singular, and the type of one."""

E = TypeVar("E", bound=Entry)


class BrokenPlugin(NamedTuple):
    """A third party's plugin that was left out."""

    distribution: str
    entry_point: str
    reason: str

    def __str__(self) -> str:
        return f"Plugin {self.entry_point!r} of {self.distribution} is left out: {self.reason}"


@dataclass(frozen=True, slots=True)
class Registry:
    """Entries by name, sorted, and the plugins that were left out.

    Attributes:
        origins: (kind, name) -> distribution that announced it; kind is `policy`, `task` or `model`.
    """

    policies: Mapping[str, PolicyEntry]
    tasks: Mapping[str, TaskEntry]
    models: Mapping[str, ModelEntry]
    origins: Mapping[tuple[str, str], str]
    broken: tuple[BrokenPlugin, ...] = ()

    def policy(self, name: str) -> PolicyEntry:
        """Return the policy of that name; `-` stands for `_`."""
        return self._find("policy", name, self.policies)

    def task(self, name: str) -> TaskEntry:
        """Return the task of that name; `-` stands for `_`."""
        return self._find("task", name, self.tasks)

    def model(self, name: str) -> ModelEntry:
        """Return the model of that name; `-` stands for `_`."""
        return self._find("model", name, self.models)

    def by_kind(self) -> dict[str, Mapping[str, Entry]]:
        """Return everything, as kind -> name -> entry."""
        return {"policy": self.policies, "task": self.tasks, "model": self.models}

    def _find(self, kind: str, name: str, known: Mapping[str, E]) -> E:
        entry = known.get(canonical(name))
        if entry is None:
            raise unknown_name(kind, name, known)
        return entry


class _Announcement(NamedTuple):
    """One entry that one plugin announced."""

    kind: str
    entry: Entry
    plugin: EntryPoint


@functools.cache
def load_registry() -> Registry:
    """Load every installed plugin, once a process, and name the broken ones on stderr."""
    registry = build_registry(entry_points(group=hookspecs.PROJECT))
    for broken in registry.broken:
        print(f"warning: {broken}", file=sys.stderr)
    return registry


def build_registry(points: Iterable[EntryPoint]) -> Registry:
    """Build a registry from entry points, whatever their order.

    Raises:
        KvbenchError: kvbench's own plugins are missing or wrong.
    """
    ordered = sorted(points, key=lambda point: (distribution_of(point), point.name, point.value))
    if not any(distribution_of(point) == OWN for point in ordered):
        raise KvbenchError("kvbench is importable but not installed, so it has no plugins; try 'pip install -e .'.")
    found: list[_Announcement] = []
    broken: list[BrokenPlugin] = []
    for point in ordered:
        try:
            found += _announcements(point)
        except (Exception, SystemExit) as error:  # a stranger's module may raise anything at import
            reason = str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}"
            if distribution_of(point) == OWN:
                raise KvbenchError(f"kvbench's own plugin {point.name!r} is broken: {reason}") from error
            broken.append(BrokenPlugin(distribution_of(point), point.name, reason))
    kept, clashes = _without_clashes(found)
    return _registry(kept, [*broken, *clashes])


def distribution_of(point: EntryPoint) -> str:
    """Return the normalized name of the distribution that declares an entry point."""
    name = point.dist.name if point.dist is not None else "an unknown distribution"
    return re.sub(r"[-_.]+", "-", name).lower()


def _announcements(point: EntryPoint) -> list[_Announcement]:
    """Load one plugin in a plugin manager of its own, so that nothing it does touches another."""
    plugin = point.load()
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=point.name)
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        # What PluginManager.check_pending refuses, with near misses.
        if caller.spec is None and not all(implementation.optionalhook for implementation in caller.get_hookimpls()):
            raise unknown_name("hook", caller.name, HOOKS)
    if not callers:
        raise KvbenchError(f"{point.value} implements no hook; decorate a function with kvbench.hookspecs.hookimpl.")
    return [
        _Announcement(kind, entry, point)
        for hook, (kind, entry_type) in HOOKS.items()
        for entry in _collect(getattr(manager.hook, hook), hook, entry_type)
    ]


def _collect(hook: Callable[[], list[object]], name: str, entry_type: type[Entry]) -> list[Entry]:
    """Call one hook of one plugin and check what it returns."""
    entries: list[Entry] = []
    for result in hook():
        if not isinstance(result, Iterable):
            raise KvbenchError(f"{name} returned {type(result).__name__}; return an iterable of {entry_type.__name__}.")
        for entry in result:
            if not isinstance(entry, entry_type):
                raise KvbenchError(f"{name} returned an item {entry!r}; return {entry_type.__name__} items.")
            entries.append(entry)
    return entries


def _without_clashes(found: list[_Announcement]) -> tuple[list[_Announcement], list[BrokenPlugin]]:
    """Leave out every third-party plugin that announces a name twice or a name that another announces too.

    Of two strangers with one name both go: a benchmark must not let the order of installation choose what a name means.
    """
    count = Counter((item.kind, item.entry.name) for item in found)
    owners: dict[tuple[str, str], list[EntryPoint]] = {}
    for item in found:
        owners.setdefault((item.kind, item.entry.name), []).append(item.plugin)
    reasons: dict[EntryPoint, str] = {}
    for (kind, name), points in owners.items():
        if count[kind, name] == 1:
            continue
        sources = " and ".join(f"{distribution_of(point)} ({point.name})" for point in points)
        reason = f"The {kind} name {name!r} is announced by {sources}; rename one or uninstall one."
        strangers = [point for point in points if distribution_of(point) != OWN]
        if len(points) - len(strangers) > 1:
            raise KvbenchError(reason)
        for point in strangers:
            reasons.setdefault(point, reason)
    clashes = [BrokenPlugin(distribution_of(point), point.name, reason) for point, reason in reasons.items()]
    return [item for item in found if item.plugin not in reasons], clashes


def _registry(kept: list[_Announcement], broken: list[BrokenPlugin]) -> Registry:
    kept = sorted(kept, key=lambda item: item.entry.name)
    return Registry(
        policies=MappingProxyType({i.entry.name: i.entry for i in kept if isinstance(i.entry, PolicyEntry)}),
        tasks=MappingProxyType({i.entry.name: i.entry for i in kept if isinstance(i.entry, TaskEntry)}),
        models=MappingProxyType({i.entry.name: i.entry for i in kept if isinstance(i.entry, ModelEntry)}),
        origins=MappingProxyType({(i.kind, i.entry.name): distribution_of(i.plugin) for i in kept}),
        broken=tuple(sorted(broken)),
    )
