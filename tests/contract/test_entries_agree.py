"""What `kvbench describe` says without importing torch is what the classes declare."""

from __future__ import annotations

import dataclasses

import pytest

from kvbench.core.policy import Policy
from kvbench.plugins import load_registry

POLICIES = load_registry().policies


def load(name: str) -> type[Policy]:
    loaded = POLICIES[name].load()
    assert isinstance(loaded, type)
    assert issubclass(loaded, Policy)
    return loaded


@pytest.mark.parametrize("name", POLICIES)
def test_capabilities(name: str) -> None:
    entry, policy = POLICIES[name], load(name)
    assert policy.name == name
    assert policy.learned == entry.learned
    assert policy.hard_budget == entry.hard_budget
    assert policy.static == (entry.prefill == "exact")
    assert policy.static == ("attention" not in entry.needs)


@pytest.mark.parametrize("name", POLICIES)
def test_parameters(name: str) -> None:
    declared = [(field.name, str(field.default)) for field in dataclasses.fields(load(name))]
    assert [(parameter.name, parameter.default) for parameter in POLICIES[name].parameters] == declared


@pytest.mark.parametrize("kind", ["policy", "task", "model"])
def test_every_target_is_a_class(kind: str) -> None:
    for entry in load_registry().by_kind()[kind].values():
        assert isinstance(entry.load(), type)
