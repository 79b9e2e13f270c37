"""Graders of the mathematical tasks on completions that people wrote; and on what should harm nobody."""

from __future__ import annotations

import threading
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.dataset import Rows
from kvbench.core.task import Problem
from kvbench.plugins import load_registry
from kvbench_tasks.math_equality import Equality
from kvbench_tasks.math_task import MathTask

GROUPS = tomllib.loads((Path(__file__).parent / "math_completions.toml").read_text("utf-8"))["group"]
TABLE = [(group["task"], *row) for group in GROUPS for row in group["rows"]]


def task_of(name: str, answer: Any) -> tuple[MathTask, Problem]:
    made = load_registry().task(name).load()
    assert isinstance(made, type)
    assert issubclass(made, MathTask)
    record = {made.problem_columns[0]: "How many?", made.answer_columns[0]: answer}
    task = made(Rows([record], "test.jsonl", "sha256:0"))
    return task, task.problems(16, 1, seed=0)[0]


@pytest.fixture(scope="module")
def equality() -> Equality:
    """One child process for the whole table."""
    return Equality(seconds=20)


def test_the_table_is_large_and_mixed() -> None:
    verdicts = Counter(row[3] for row in TABLE)
    assert len(TABLE) >= 120
    assert min(verdicts[verdict] for verdict in ("right", "wrong", "none")) >= 10
    assert len({row[:3] for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}: {row[4]}")
def test_grade(row: tuple[str, str, str, str, str], equality: Equality, monkeypatch: pytest.MonkeyPatch) -> None:
    name, gold, completion, verdict, _ = row
    task, problem = task_of(name, gold)
    monkeypatch.setattr(task, "_equality", equality)
    grade = task.grade(problem, completion)
    assert (grade.exact, grade.extracted is None) == (float(verdict == "right"), verdict == "none")
    assert grade.finished == (verdict != "none")
    assert grade.steps_correct is None


@pytest.mark.parametrize(
    ("gold", "answer", "also"),
    [
        (["33"], "33", "32"),
        (["33", "34"], "34", "35"),
        ("['33']", "33", "3"),
        ('["33", "34"]', "34", "33, 34"),
        (33, "33", "34"),
        (33.0, "33", "33.5"),
        ("[0, 1]", "[0,1]", "0"),
    ],
)
def test_gold_answers_are_texts_numbers_or_lists_of_writings(gold: object, answer: str, also: str) -> None:
    task, problem = task_of("math500", gold)
    assert task.grade(problem, f"\\boxed{{{answer}}}").exact == 1
    assert task.grade(problem, f"\\boxed{{{also}}}").exact == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("073", "73"),
        ("\\frac{2}{4}", "0.5"),
        ("3, 2", "2,3"),
        ("1,234", "1234"),
        ("\\text{Yes}", "yes"),
        ("5\\text{ cm}", "5"),
    ],
)
def test_votes_for_equal_answers_are_one_text(one: str, other: str) -> None:
    task, problem = task_of("math500", "7")
    grades = [task.grade(problem, f"\\boxed{{{text}}}") for text in (one, other)]
    assert grades[0].extracted == grades[1].extracted is not None


HOSTILE = {
    "tower": "10^{10^{10^{10}}}",
    "factorial": "(10^9)!!!",
    "digits": "9" * 2_000_000,
    "zeros": "0" * 2_000_000 + "7",
    "deep fraction": "\\frac{1}{" * 100 + "1" + "}" * 100,
    "deep brackets": "(" * 400 + ")" * 400,
    "sum": "\\sum_{k=1}^{10^{12}} \\sin(k!)",
    "code": "__import__('os').system('touch harmed')",
    "surrogate": "\ud800",
    "null": "7\x00",
}


def test_hostile_answers_are_wrong_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task, problem = task_of("hmmt_feb25", "\\sqrt{7}")
    task._equality = Equality(seconds=1)
    for name, answer in HOSTILE.items():
        begun = time.monotonic()
        grade = task.grade(problem, f"\\boxed{{{answer}}}")
        assert (name, grade.exact) == (name, 0.0)
        assert time.monotonic() - begun < 20  # of which one second is the limit and the rest a new process
        assert len(grade.extracted or "") <= 1000
    assert task.grade(problem, "\\boxed{\\frac{7}{\\sqrt{7}}}").exact == 1
    assert list(tmp_path.iterdir()) == []


def test_a_million_boxes_are_read_in_passing() -> None:
    task, problem = task_of("aime24", "7")
    begun = time.monotonic()
    assert task.grade(problem, "\\boxed{" * 300_000).extracted is None
    assert task.grade(problem, "\\boxed{" * 300_000 + "7}").exact == 1
    assert task.grade(problem, "\\boxed{" * 300_000 + "7" + "}" * 300_000).exact == 1
    assert time.monotonic() - begun < 5


def test_grading_works_beside_the_main_thread() -> None:
    task, problem = task_of("hmmt_feb25", "\\sqrt{12}")
    grades: list[float] = []
    thread = threading.Thread(target=lambda: grades.append(task.grade(problem, "\\boxed{2\\sqrt{3}}").exact))
    thread.start()
    thread.join()
    assert grades == [1.0]


def test_the_process_is_replaced_when_it_dies() -> None:
    equality = Equality()
    assert equality.same("\\sqrt{12}", "2\\sqrt{3}")
    first = equality._child
    assert first is not None
    first.kill()
    first.wait()
    assert equality.same("\\sqrt{12}", "\\sqrt{4 \\cdot 3}")
    assert equality._child is not first
