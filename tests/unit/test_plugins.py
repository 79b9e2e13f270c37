from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, EntryPoint, PathDistribution
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.plugins import build_registry, load_registry

HEADER = "from kvbench.entries import PolicyEntry, TaskEntry\nfrom kvbench.hookspecs import hookimpl\n"

Plugin = Callable[..., EntryPoint]


def policies(*names: str, hook: str = "kvbench_policies") -> str:
    entries = ", ".join(f"PolicyEntry(name={name!r}, target='m:C', summary='s')" for name in names)
    return f"{HEADER}@hookimpl\ndef {hook}():\n    return [{entries}]\n"


def distribution(folder: Path, name: str) -> Distribution:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    return PathDistribution(info)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugin]:
    """Make the entry point of a plugin module with the given source, in a distribution of the given name."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(source: str, distribution_name: str = "stranger", name: str = "theirs") -> EntryPoint:
        module = f"planted_{len(made)}_{tmp_path.name}".replace("-", "_")
        made.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        point = EntryPoint(name=name, value=module, group="kvbench")
        # Not public, but the only way to make the pair that importlib.metadata makes.
        vars(point).update(dist=distribution(tmp_path, distribution_name))
        return point

    yield make
    for module in made:
        sys.modules.pop(module, None)


@pytest.fixture
def own(plugin: Plugin) -> EntryPoint:
    return plugin(policies("mine"), "kvbench", "policies")


def test_the_installed_registry_has_everything_that_ships() -> None:
    registry = load_registry()
    assert {"full", "random", "streaming_llm", "tova", "tova_head", "kvpop", "kvpop_mlp"} <= set(registry.policies)
    assert {"recurrence", "codebook", "ledger", "program", "chain", "stack"} <= set(registry.tasks)
    assert registry.models["ref"].licence == "Apache-2.0"
    assert registry.origins["policy", "full"] == "kvbench"
    assert [name for name, task in registry.tasks.items() if task.held_out] == ["ledger"]


def test_names_are_sorted_and_take_dashes() -> None:
    registry = load_registry()
    assert list(registry.policies) == sorted(registry.policies)
    assert registry.policy("streaming-llm") is registry.policies["streaming_llm"]


@pytest.mark.parametrize("kind", ["policy", "task", "model"])
def test_an_unknown_name_is_one_sentence(kind: str) -> None:
    registry = load_registry()
    look_up = {"policy": registry.policy, "task": registry.task, "model": registry.model}[kind]
    with pytest.raises(KvbenchError, match=f"There is no {kind} named 'nix'"):
        look_up("nix")


def test_a_stranger_registers_like_we_do(own: EntryPoint, plugin: Plugin) -> None:
    registry = build_registry([own, plugin(policies("theirs"))])
    assert list(registry.policies) == ["mine", "theirs"]
    assert registry.origins["policy", "theirs"] == "stranger"
    assert registry.broken == ()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def broken(:\n", "SyntaxError"),
        (
            f"{HEADER}@hookimpl\ndef kvbench_policies():\n    return 3\n",
            "returned int; return an iterable of PolicyEntry",
        ),
        (
            f"{HEADER}@hookimpl\ndef kvbench_policies():\n    return 'abc'\n",
            "returned an item 'a'; return PolicyEntry items",
        ),
        (
            f"{HEADER}@hookimpl\ndef kvbench_tasks():\n    return [PolicyEntry(name='a', target='m:C', summary='')]\n",
            "return TaskEntry items",
        ),
        (f"{HEADER}@hookimpl\ndef kvbench_policies():\n    raise ValueError('no')\n", "ValueError: no"),
        (f"{HEADER}@hookimpl\ndef kvbench_policies():\n    yield 1 / 0\n", "ZeroDivisionError"),
        (policies("Bad-Name"), "'Bad-Name' is not a name"),
        (policies("a", hook="kvbench_policy"), "no hook named 'kvbench_policy'; did you mean 'kvbench_policies' or"),
        (f"{HEADER}@hookimpl\ndef kvbench_policies(extra):\n    return []\n", "extra"),
        (f"{HEADER}def kvbench_policies():\n    return []\n", "implements no hook"),
        (policies("twice", "twice"), "'twice' is announced by stranger (theirs) and stranger (theirs)"),
    ],
)
def test_a_broken_stranger_is_left_out_and_named(own: EntryPoint, plugin: Plugin, source: str, reason: str) -> None:
    healthy = plugin(policies("healthy"), "another")
    registry = build_registry([plugin(source), own, healthy])
    assert list(registry.policies) == ["healthy", "mine"]
    (broken,) = registry.broken
    assert (broken.distribution, broken.entry_point) == ("stranger", "theirs")
    assert reason in broken.reason


def test_nothing_of_a_broken_plugin_is_kept(own: EntryPoint, plugin: Plugin) -> None:
    source = policies("good") + "@hookimpl\ndef kvbench_tasks():\n    return [1]\n"
    registry = build_registry([own, plugin(source)])
    assert list(registry.policies) == ["mine"]


@pytest.mark.parametrize("source", ["import nowhere_at_all", policies("a", hook="kvbench_policy")])
def test_our_own_mistake_raises(plugin: Plugin, source: str) -> None:
    with pytest.raises(KvbenchError, match="kvbench's own plugin 'policies' is broken"):
        build_registry([plugin(source, "kvbench", "policies")])


def test_our_own_duplicate_raises(plugin: Plugin) -> None:
    points = [plugin(policies("a"), "kvbench", "one"), plugin(policies("a"), "kvbench", "two")]
    with pytest.raises(KvbenchError, match=r"announced by kvbench \(one\) and kvbench \(two\)"):
        build_registry(points)


def test_a_stranger_cannot_take_our_name(own: EntryPoint, plugin: Plugin) -> None:
    registry = build_registry([plugin(policies("mine", "extra")), own])
    assert registry.origins == {("policy", "mine"): "kvbench"}
    assert "kvbench (policies) and stranger (theirs)" in registry.broken[0].reason


def test_of_two_strangers_with_one_name_neither_wins(own: EntryPoint, plugin: Plugin) -> None:
    registry = build_registry([own, plugin(policies("x"), "one"), plugin(policies("x"), "two")])
    assert list(registry.policies) == ["mine"]
    assert [broken.distribution for broken in registry.broken] == ["one", "two"]
    assert all("one (theirs) and two (theirs)" in broken.reason for broken in registry.broken)


def test_a_task_may_be_called_like_a_policy(own: EntryPoint, plugin: Plugin) -> None:
    source = f"{HEADER}@hookimpl\ndef kvbench_tasks():\n    return [TaskEntry(name='mine', target='m:C', summary='')]\n"
    registry = build_registry([own, plugin(source)])
    assert not registry.broken
    assert list(registry.tasks) == list(registry.policies) == ["mine"]


def test_the_order_of_plugins_does_not_matter(own: EntryPoint, plugin: Plugin) -> None:
    points = [
        own,
        plugin(policies("x"), "one"),
        plugin(policies("x", "y"), "two"),
        plugin(policies("z"), "three"),
        plugin("import nowhere_at_all", "four"),
    ]
    registries = [build_registry(order) for order in itertools.permutations(points)]
    assert all(registry == registries[0] for registry in registries)
    assert list(registries[0].policies) == ["mine", "z"]


def test_not_installed_is_one_sentence(plugin: Plugin) -> None:
    with pytest.raises(KvbenchError, match="not installed"):
        build_registry([plugin(policies("theirs"))])


def test_one_registry_a_process() -> None:
    assert load_registry() is load_registry()
