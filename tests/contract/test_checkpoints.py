"""The trained weights that ship are what the recipe that ships makes, on the model that ships."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from kvbench.core.budget import parse_cr
from kvbench.models.checkpoint import Checkpoint, find_checkpoint, shipped
from kvbench.models.huggingface import hash_files
from kvbench.plugins import load_registry
from kvbench.train.recipe import Recipe

NOT_YET: set[str] = set()
"""Trainable policies whose checkpoint for the reference model does not ship yet."""

TRAINED = sorted(name for name, entry in load_registry().policies.items() if entry.trainable and name not in NOT_YET)
MODEL = Path(str(files("kvbench.models"))) / "ref"


@pytest.mark.parametrize("policy", TRAINED)
def test_a_checkpoint_comes_from_the_recipe(policy: str) -> None:
    told = json.loads((find_checkpoint(policy, "ref") / "kvbench_policy.json").read_text())["recipe"]
    resolved = {"tasks", "seed"}
    # Settings that came later have defaults that change nothing.
    assert Recipe().replace({name: told[name] for name in told.keys() - resolved}) == Recipe.load("ref")


def test_every_trainable_policy_ships_a_checkpoint_or_is_known_not_to() -> None:
    for name, entry in load_registry().policies.items():
        if entry.trainable:
            assert (shipped(name, "ref") is None) == (name in NOT_YET), name


@pytest.mark.parametrize("policy", TRAINED)
def test_a_checkpoint_has_seen_no_held_out_family(policy: str) -> None:
    told = json.loads((find_checkpoint(policy, "ref") / "kvbench_policy.json").read_text())["recipe"]["tasks"]
    held_out = {name for name, entry in load_registry().tasks.items() if entry.held_out}
    assert held_out
    assert told
    assert held_out.isdisjoint(task.partition("@")[0] for task in told)


@pytest.mark.parametrize("policy", TRAINED)
def test_a_checkpoint_is_for_the_model_that_ships(policy: str) -> None:
    checkpoint = Checkpoint.load(find_checkpoint(policy, "ref"))
    assert checkpoint.policy_name == policy
    assert checkpoint.weights_hash == hash_files(MODEL)
    assert all(0 <= parse_cr(cr) < 1 for cr in checkpoint.trained_budgets["crs"])
