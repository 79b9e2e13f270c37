"""Grades of right, wrong, cut off, malformed and hostile completions."""

from __future__ import annotations

import builtins
import os
import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.task import Grade
from kvbench_tasks.recurrence import Recurrence
from kvbench_tasks.reference_task import ReferenceTask
from kvbench_tasks.vocabulary import VOCABULARY
from tests.tasks.families import FAMILIES

LEVEL = 512
BY_NAME = pytest.mark.parametrize("task", FAMILIES, ids=lambda task: task.name)


def _stores(tokens: list[str]) -> list[int]:
    """Where the first digit of each stored result is: `name = d d d ;`, unlike `d - d - d = d d ;`."""
    names = {"sum", *"abcdefghijklmnopqrstuvwxyz"}
    return [at + 1 for at, word in enumerate(tokens) if word == "=" and tokens[at - 1] in names]


def _changed(digit: str) -> str:
    return str((int(digit) + 1) % 10)


@BY_NAME
def test_the_reference_solution_is_right(task: ReferenceTask) -> None:
    for level in (128, 512, 2048):
        for problem in task.problems(level, 5, seed=11):
            completion = task.trace(problem).completion
            for text in (completion, completion.removesuffix(" <eos>"), f"  {completion}\n\t", f"{completion} <pad> 1"):
                assert task.grade(problem, text) == Grade(1.0, 1.0, finished=True)


@BY_NAME
def test_steps_count_up_to_the_first_error(task: ReferenceTask) -> None:
    problem = task.problem(LEVEL, 0, seed=4)
    tokens = task.trace(problem).completion.split()
    stores = _stores(tokens)
    steps = task.size(LEVEL).steps
    assert len(stores) == steps
    for right, at in enumerate(stores):
        wrong = [*tokens]
        wrong[at + right % 3] = _changed(wrong[at + right % 3])
        assert task.grade(problem, " ".join(wrong)) == Grade(1.0, right / steps, finished=True)


@BY_NAME
def test_a_wrong_answer_is_wrong_however_good_the_steps_were(task: ReferenceTask) -> None:
    problem = task.problem(LEVEL, 1, seed=4)
    tokens = task.trace(problem).completion.split()
    answer = tokens.index("answer")
    for at in range(answer + 1, len(tokens) - 1):
        if tokens[at].isdigit():
            wrong = [*tokens[:at], _changed(tokens[at]), *tokens[at + 1 :]]
            assert task.grade(problem, " ".join(wrong)) == Grade(0.0, 1.0, finished=True)
    more = [*tokens[:-1], "0", "<eos>"]
    less = [*tokens[:-2], "<eos>"]
    twice = [*tokens[: answer + 1], "answer", *tokens[answer + 1 :]]
    glued = [*tokens[: answer + 1], "".join(tokens[answer + 1 : -1]), "<eos>"]
    for wrong in (more, less, twice, glued):
        assert task.grade(problem, " ".join(wrong)) == Grade(0.0, 1.0, finished=True)


@BY_NAME
def test_a_completion_that_was_cut_off(task: ReferenceTask) -> None:
    problem = task.problem(LEVEL, 2, seed=4)
    tokens = task.trace(problem).completion.split()
    stores, steps = _stores(tokens), task.size(LEVEL).steps
    for end in range(0, len(tokens) - 1, 7):
        grade = task.grade(problem, " ".join(tokens[:end]))
        whole = sum(at + 3 < end for at in stores)  # three digits and the semicolon
        assert (grade.steps_correct, grade.finished) == (whole / steps, False)
        assert grade.exact == 0.0
    assert task.grade(problem, " ".join(tokens[:-2])) == Grade(0.0, 1.0, finished=False)
    assert task.grade(problem, "") == Grade(0.0, 0.0, finished=False)


@BY_NAME
def test_the_first_answer_counts_and_nothing_after_the_end(task: ReferenceTask) -> None:
    problem = task.problem(LEVEL, 3, seed=4)
    completion = task.trace(problem).completion
    assert task.grade(problem, f"answer 0 <eos> {completion}") == Grade(0.0, 0.0, finished=True)
    assert task.grade(problem, f"<eos> {completion}") == Grade(0.0, 0.0, finished=False)
    assert task.grade(problem, f"answer {problem.answer} <eos>") == Grade(1.0, 0.0, finished=True)


@BY_NAME
def test_another_problems_solution_is_wrong(task: ReferenceTask) -> None:
    one, other = task.problems(LEVEL, 2, seed=8)
    grade = task.grade(one, task.trace(other).completion)
    assert (grade.exact, grade.finished) == (0.0, True)
    assert grade.steps_correct is not None
    assert grade.steps_correct < 1


HOSTILE = [
    "__import__('os').system('true')",
    "answer __import__('os').system('true') <eos>",
    "a = 9 9 9 ; " * 20_000,
    "answer " * 50_000,
    "= " * 50_000 + ";",
    "a = " + "9" * 10_000 + " ;",
    "\x00\x1b[2J\ud800 answer \U0001f600",
    "answer \u0661 \u0662 \u0663 <eos>",  # digits, but Arabic ones
    "a = \u0661 \u0662 \u0663 ;",
    "a = -1 2 3 ; a = 1e9 2 3 ; a = 0x1 2 3 ;",
    "{0.__class__} %s %n ${HOME} `id` $(id)",
    "<eos><eos>answer",
    "answer",
    "answer <eos>",
    "<bos> recurrence 9 9 z : do",
    "]" * 5000 + "(" * 5000,
]


@BY_NAME
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_are_wrong_and_nothing_else(
    task: ReferenceTask, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a completion was carried out")

    problem = task.problem(LEVEL, 0, seed=4)
    with monkeypatch.context() as patch:
        for module, name in ((builtins, "eval"), (builtins, "exec"), (os, "system"), (subprocess, "Popen")):
            patch.setattr(module, name, refuse)
        grade = task.grade(problem, text)
    assert grade.exact == 0.0
    assert grade.steps_correct == 0.0


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.one_of(st.text(max_size=200), st.lists(st.sampled_from(VOCABULARY), max_size=60).map(" ".join)),
)
def test_any_text_has_a_grade(task: ReferenceTask, text: str) -> None:
    grade = task.grade(task.problem(128, 0, seed=0), text)
    assert grade.exact in (0.0, 1.0)
    assert grade.steps_correct is not None
    assert 0 <= grade.steps_correct <= 1
    assert isinstance(grade.finished, bool)


def test_spaces_between_words_do_not_count_but_words_do() -> None:
    task = Recurrence()
    problem = task.problem(128, 0, seed=0)
    assert task.grade(problem, "answer \n" + problem.answer.replace(" ", "   ")).exact == 1.0
    assert task.grade(problem, "Answer " + problem.answer).exact == 0.0
