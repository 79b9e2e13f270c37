from __future__ import annotations

import dataclasses

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.entries import ModelEntry, PolicyEntry, TaskEntry, load_target


def test_entries_are_frozen_and_hashable() -> None:
    entry = PolicyEntry(name="a", target="m:C", summary="s")
    assert hash(entry) == hash(PolicyEntry(name="a", target="m:C", summary="s"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "b"  # type: ignore[misc]  # what the test is about


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", "a b", "a.b", "_a"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(KvbenchError, match="is not a name"):
        TaskEntry(name=name, target="m:C", summary="s")


@pytest.mark.parametrize("target", ["", "m", "m.C", "m:", ":C", "m:C.d", "m n:C", "m-n:C"])
def test_a_bad_target_is_refused(target: str) -> None:
    with pytest.raises(KvbenchError, match=r"write it as 'package\.module:Class'"):
        ModelEntry(name="a", target=target, summary="s", licence="MIT")
    with pytest.raises(KvbenchError, match=r"write it as 'package\.module:Class'"):
        load_target(target)


def test_a_target_is_loaded() -> None:
    assert load_target("kvbench.entries:PolicyEntry") is PolicyEntry
    assert PolicyEntry(name="a", target="kvbench.entries:TaskEntry", summary="s").load() is TaskEntry


def test_a_missing_module_is_named() -> None:
    with pytest.raises(KvbenchError, match=r"Cannot import 'kvbench\.nowhere'"):
        load_target("kvbench.nowhere:Thing")


def test_a_missing_class_is_named_with_near_misses() -> None:
    with pytest.raises(
        KvbenchError, match=r"no class in kvbench\.entries named 'PolicyEntri'; did you mean 'PolicyEntry'"
    ):
        load_target("kvbench.entries:PolicyEntri")
