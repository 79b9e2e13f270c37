from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.core.task import Task
from kvbench.harness.choices import Choice, Choices, make_policy
from kvbench.harness.options import Checked, RunOptions, check
from kvbench.harness.plan import Plan, make_plan
from kvbench.harness.problems import ProblemSource
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry

REGISTRY = load_registry()


def choice(name: str, **more: Any) -> Choice:
    return Choice(make_policy(REGISTRY.policy(name), ())[0], **more)


def checkpoint(name: str) -> Any:
    return SimpleNamespace(hash=name, lm_weights={})


def checked(tasks: tuple[str, ...] = ("words",), **options: Any) -> Checked:
    made = check(RunOptions(**{"policies": ("tova",), "gen_lens": (8,), "limit": 4, **options}), REGISTRY)
    return replace(made, tasks=tasks)


def plan(made: Checked, loaded: LoadedModel, tasks: dict[str, Task], *policies: Choice) -> Plan:
    return make_plan(made, Choices(policies, choice("full")), loaded, ProblemSource(loaded, tasks))


def test_each_task_length_and_seed_gets_one_dense_twin(loaded: LoadedModel, tasks: dict[str, Task]) -> None:
    made = checked(("words", "held"), crs=("0.5", "3/4"), gen_lens=(8, 16), seeds=(0, 1))
    cells = [p.cell for p in plan(made, loaded, tasks, choice("tova"), choice("random")).planned]
    dense = [cell for cell in cells if cell.role == "dense"]
    assert len(dense) == 2 * 2 * 2
    assert len(cells) == len(dense) * (1 + 2 * 2)
    assert cells[: len(dense)] == dense
    assert {cell.twin_key for cell in cells} == {cell.twin_key for cell in dense}


def test_budgets_come_from_the_longest_prompt_of_the_level(loaded: LoadedModel, tasks: dict[str, Task]) -> None:
    _, cell = [p.cell for p in plan(checked(crs=("0.5",)), loaded, tasks, choice("tova")).planned]
    assert (cell.reference_length, cell.slots) == (3 + 8, 6)  # half of 11, rounded half up


def test_another_reference_length_moves_the_budget_and_not_the_twin(
    loaded: LoadedModel, tasks: dict[str, Task]
) -> None:
    made = checked(crs=("7/8",), reference_length=64)
    dense, cell = [p.cell for p in plan(made, loaded, tasks, choice("tova")).planned]
    assert (cell.reference_length, cell.slots) == (64, 8)
    assert dense.reference_length == 11


def test_slots_may_be_asked_for(loaded: LoadedModel, tasks: dict[str, Task]) -> None:
    _, cell = [p.cell for p in plan(checked(budgets=(5,)), loaded, tasks, choice("tova")).planned]
    assert (cell.slots, cell.cr) == (5, None)


def test_the_second_twin_has_to_be_asked_for(loaded: LoadedModel, tasks: dict[str, Task]) -> None:
    one = checkpoint("1")
    made = plan(checked(budgets=(6,)), loaded, tasks, choice("random", checkpoint=one, adapted=one))
    assert [p.cell.role for p in made.planned] == ["dense", "policy"]


def test_each_adapted_lm_gets_its_own_dense_twin(loaded: LoadedModel, tasks: dict[str, Task]) -> None:
    one, two = checkpoint("1"), checkpoint("2")
    policies = [
        choice("tova"),
        choice("random", checkpoint=one, adapted=one),
        choice("streaming_llm", checkpoint=two, adapted=two),
    ]
    asked = checked(budgets=(6,), dense_adapted=True)
    cells = [p.cell for p in plan(asked, loaded, tasks, *policies).planned]
    assert [(cell.policy, cell.adapted_lm) for cell in cells] == [
        ("full", None),
        ("tova", None),
        ("full", "1"),
        ("random", "1"),
        ("full", "2"),
        ("streaming_llm", "2"),
    ]


def test_no_twins_on_request(loaded: LoadedModel, tasks: dict[str, Task]) -> None:
    cells = plan(checked(budgets=(6,), dense=False), loaded, tasks, choice("tova")).planned
    assert [p.cell.policy for p in cells] == ["tova"]
    cells = plan(checked(budgets=(6,), dense=False), loaded, tasks, choice("tova"), choice("full")).planned
    assert [p.cell.policy for p in cells] == ["full", "tova"]


def test_a_ratio_written_twice_is_one_cell(loaded: LoadedModel, tasks: dict[str, Task]) -> None:
    made = checked(crs=("1/2", "0.5"))
    assert len(plan(made, loaded, tasks, choice("full"), choice("random")).planned) == 2


def test_a_budget_below_the_smallest_is_skipped_with_the_reason(loaded: LoadedModel, tasks: dict[str, Task]) -> None:
    policies = choice("streaming_llm"), choice("random")
    skipped = [p for p in plan(checked(budgets=(3,)), loaded, tasks, *policies).planned if p.skip]
    assert [p.cell.policy for p in skipped] == ["streaming_llm"]
    assert "needs a budget of at least" in (skipped[0].skip or "")


@pytest.mark.parametrize("names", [("words",), ("words", "held")])
def test_nothing_but_skipped_cells_is_an_error(
    loaded: LoadedModel, tasks: dict[str, Task], names: tuple[str, ...]
) -> None:
    with pytest.raises(KvbenchError, match=r"streaming_llm.* needs .*at least 6 slots|smallest"):
        plan(checked(names, budgets=(3,)), loaded, tasks, choice("streaming_llm"))


def test_more_tokens_than_positions(loaded: LoadedModel, tasks: dict[str, Task]) -> None:
    short = replace(loaded, max_positions=12)
    made = plan(checked(budgets=(6,), gen_lens=(8, 16)), short, tasks, choice("random"))
    assert [p.skip is None for p in made.planned if p.cell.gen_length == 8] == [True, True]
    reasons = [p.skip for p in made.planned if p.cell.gen_length == 16]
    assert all(r and "needs 19 positions" in r and "'tiny' has 12" in r for r in reasons)
    with pytest.raises(KvbenchError, match="needs 19 positions"):
        plan(checked(budgets=(6,), gen_lens=(16,)), short, tasks, choice("random"))


def test_shards_share_the_grid(loaded: LoadedModel, tasks: dict[str, Task], tmp_path: Path) -> None:
    parts = [
        plan(checked(budgets=(4, 5, 6), shard=f"{i}/3", out=tmp_path), loaded, tasks, choice("random"))
        for i in (1, 2, 3)
    ]
    whole = sorted(p.cell.key for p in parts[0].planned)
    assert sorted(p.cell.key for part in parts for p in part.mine) == whole
