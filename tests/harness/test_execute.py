from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.cell import Cell
from kvbench.core.errors import KvbenchError
from kvbench.core.task import Task
from kvbench.engine.requests import Audit, Completion, Generation, Request, Timing
from kvbench.harness import execute
from kvbench.harness.choices import Choice, make_policy
from kvbench.harness.execute import LocalExecutor
from kvbench.harness.plan import Planned
from kvbench.harness.problems import ProblemSource
from kvbench.harness.ungraded import Ungraded
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry

AUDIT = Audit(4, 4, 0, 0.4, 0.5, 0.6, 100, 10, 5, 7, 3, ((3.0,),), False)
RANDOM = make_policy(load_registry().policy("random"), ())[0]


class FakeEngine:
    """Answers with the prompt's number, except 3, where it babbles until the cap."""

    audit = AUDIT

    def __init__(self, *_: Any) -> None:
        pass

    def generate(self, requests: Sequence[Request], *_: Any) -> Generation:
        completions = tuple(
            Completion((11,) * request.max_new, "length", 1)
            if request.prompt[-1] == 13
            else Completion((request.prompt[-1], 2), "eos", 0)
            for request in requests
        )
        return Generation(completions, self.audit, Timing(1.0, 1.0, 10, 20), "exact", "plain", None)


@pytest.fixture
def ungraded(tmp_path: Path) -> Ungraded:
    return Ungraded(tmp_path)


@pytest.fixture
def executor(
    loaded: LoadedModel, tasks: dict[str, Task], ungraded: Ungraded, monkeypatch: pytest.MonkeyPatch
) -> LocalExecutor:
    monkeypatch.setattr(execute, "Engine", FakeEngine)
    return LocalExecutor(loaded, ProblemSource(loaded, tasks), ungraded)


def test_a_cell_becomes_a_row(executor: LocalExecutor, cell: Callable[..., Cell]) -> None:
    planned = Planned(cell(samples=2), Choice(RANDOM), held_out=True)
    outcome = executor.execute(planned)
    row = outcome.result
    assert (row.status, row.n, row.samples, row.score, row.held_out) == ("ok", 4, 2, 0.75, True)
    assert row.score_lo is not None
    assert row.score_hi is not None
    assert row.score_lo < 0.75 < row.score_hi
    assert (row.truncated, row.score_finished, row.near_ties) == (0.25, 1.0, 2)
    assert (row.prompt_length, row.output_length) == (2, (6 * 2 + 2 * 8) / 8)
    assert (row.pass_at_k, row.steps_correct) == (0.75, 0.75)
    assert (row.cr_mean, row.kv_bytes, row.scorer_bytes, row.evictions) == (0.4, 100, 10, 7)
    assert (row.metadata_bytes, row.sliding_bytes) == (5, 3)
    assert (row.ms_per_step, row.tokens_per_s) == (100.0, 10.0)
    assert row.relative is None
    assert row.environment is not None
    texts = [record.text for record in outcome.completions]
    assert texts[:2] == ["0", "0"]
    assert texts[-1] == " ".join(["1"] * 8)
    assert [record.grade.sample for record in outcome.completions] == [0, 1] * 4


def test_whatever_breaks_is_a_failed_row(
    executor: LocalExecutor, cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of\n memory")

    monkeypatch.setattr(FakeEngine, "generate", broken)
    outcome = executor.execute(Planned(cell(), Choice(RANDOM), held_out=False))
    assert (outcome.result.status, outcome.result.reason) == ("failed", "RuntimeError: out of memory")
    assert outcome.completions == ()
    assert outcome.result.score is None


def test_a_grader_that_fails_loses_no_completion(
    executor: LocalExecutor,
    ungraded: Ungraded,
    tasks: dict[str, Task],
    cell: Callable[..., Cell],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    planned = Planned(cell(samples=2), Choice(RANDOM), held_out=False)
    wanted = executor.execute(planned)
    assert not (tmp_path / "ungraded").exists()
    task = tasks[planned.cell.task]

    def broken(*_: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(type(task), "grade", broken)
        failed = executor.execute(planned).result
    assert failed.status == "failed"
    assert failed.reason is not None
    assert failed.reason.endswith("RuntimeError: no room The completions are kept: the same command grades them again.")
    # The next run grades what is there, and the row says what made it.
    kept = ungraded.get(planned.cell.key)
    assert kept is not None
    ungraded.put(planned.cell.key, replace(kept, commit="before"))
    monkeypatch.setattr(FakeEngine, "generate", broken)
    outcome = executor.execute(planned)
    assert outcome.result == replace(wanted.result, commit="before")
    assert outcome.completions == wanted.completions
    ungraded.drop(planned.cell.key)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "ungraded").mkdir()
    (tmp_path / "ungraded" / "k.json").write_text("{")
    with pytest.raises(KvbenchError, match=r"k\.json is damaged; remove it"):
        Ungraded(tmp_path).get("k")


def test_what_takes_long_to_grade_is_kept_before(
    executor: LocalExecutor,
    ungraded: Ungraded,
    tasks: dict[str, Task],
    cell: Callable[..., Cell],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = Planned(cell(), Choice(RANDOM), held_out=False)
    task = tasks[planned.cell.task]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(task), "grades_apart", True)
    monkeypatch.setattr(type(task), "grade", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.execute(planned)
    assert ungraded.get(planned.cell.key) is not None


def test_a_policy_over_budget_fails_its_cell(
    executor: LocalExecutor, cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "audit", replace(AUDIT, violations=3, peak=5))
    outcome = executor.execute(Planned(cell(), Choice(RANDOM), held_out=False))
    assert outcome.result.status == "failed"
    assert "over its budget of 4 slots in 3" in (outcome.result.reason or "")
    assert outcome.result.score is None


def test_every_completion_has_its_own_stream(
    executor: LocalExecutor, cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    answer = FakeEngine.generate

    def listening(self: FakeEngine, requests: Sequence[Request], *more: Any) -> Generation:
        seen.extend(request.seed for request in requests)
        return answer(self, requests, *more)

    monkeypatch.setattr(FakeEngine, "generate", listening)
    executor.execute(Planned(cell(samples=3), Choice(RANDOM), held_out=False))
    assert len(set(seen)) == len(seen) == 12
