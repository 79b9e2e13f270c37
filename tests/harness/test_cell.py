from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvbench.core.cell import Cell

MakeCell = Callable[..., Cell]

CHANGES: dict[str, object] = {
    "weights_hash": "x" * 64,
    "policy": "tova",
    "policy_args": (("sinks", "8"),),
    "checkpoint": "c",
    "adapted_lm": "a",
    "task": "other",
    "task_version": 2,
    "gen_length": 16,
    "slots": 5,
    "reference_length": 9,
    "problems": 5,
    "samples": 2,
    "seed": 1,
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 5,
    "dtype": "bfloat16",
    "device": "cuda",
    "rows": 8,
    "attention": "plain",
    "version": 2,
    "data_revision": "r",
    "chat_template": "plain",
}
OF_THE_POLICY = {"policy", "policy_args", "checkpoint", "adapted_lm", "slots", "reference_length"}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_a_number_changes_the_key(cell: MakeCell, name: str) -> None:
    assert cell(**{name: CHANGES[name]}).key != cell().key


@pytest.mark.parametrize("name", CHANGES)
def test_rows_are_paired_across_policies_and_budgets_only(cell: MakeCell, name: str) -> None:
    assert (cell(**{name: CHANGES[name]}).twin_key == cell().twin_key) == (name in OF_THE_POLICY)


def test_every_field_is_thought_of() -> None:
    assert {field.name for field in dataclasses.fields(Cell)} == CHANGES.keys() | {"model", "cr", "problems_requested"}


def test_how_a_ratio_is_written_does_not_matter(cell: MakeCell) -> None:
    assert cell(cr="1/2").key == cell(cr="0.5").key == cell(cr=None).key


def test_the_key_is_the_same_tomorrow(cell: MakeCell) -> None:
    assert cell().key == "aa2ec62db19c6eed"


def test_roles(cell: MakeCell) -> None:
    assert cell().role == "policy"
    assert cell(policy="full", slots=None).role == "dense"
    assert cell(policy="full", slots=None, adapted_lm="a").role == "dense_adapted"


def test_random_streams_differ_by_problem_sample_and_seed_but_not_by_policy(cell: MakeCell) -> None:
    streams = [cell(seed=seed).stream(problem, sample) for seed in (0, 1) for problem in "ab" for sample in range(3)]
    assert len(set(streams)) == len(streams)
    assert all(0 <= stream < 2**63 for stream in streams)
    assert cell(policy="tova", slots=2).stream("a", 0) == cell().stream("a", 0)
