from __future__ import annotations

import random
import re

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.core.task import Problem
from kvbench_tasks.needle_multikey import NeedleMultikey
from kvbench_tasks.needle_multivalue import NeedleMultivalue
from kvbench_tasks.needle_single import NeedleSingle
from kvbench_tasks.needles import ADJECTIVES, NOUNS, NeedleTask, filling
from kvbench_tasks.variable_tracking import VariableTracking

ALL = [NeedleSingle(), NeedleMultikey(), NeedleMultivalue(), VariableTracking()]
BY_NAME = pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)


def _words(text: str) -> int:
    return len(text.split())


def _letters(text: str) -> int:
    return len(text)


def _solve(prompt: str) -> list[str]:
    """An independent reader of the prompt."""
    text, _, question = prompt.rpartition("\n")
    if "VAR" in text:
        value = re.findall(r"assigned the value (\d+)", question)[0]
        known = {value}
        while more := {a for a, b in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text) if b in known} - known:
            known |= more
        return sorted(known - {value})
    name = re.findall(r"special magic numbers? for ([a-z]+ [a-z]+) mentioned", question)[0]
    return sorted(re.findall(rf"special magic numbers for {name} is: (\d+)\.", text))


@BY_NAME
@pytest.mark.parametrize(("count", "length"), [(_words, 400), (_words, 3000), (_letters, 2000)])
def test_prompts_are_as_long_as_they_may_be_and_hold_the_answer(task: NeedleTask, count: object, length: int) -> None:
    assert callable(count)
    longest_line = max(map(count, filling()))
    for problem in task.fitted(length, 5, 0, count):
        assert length - longest_line - 1 <= count(problem.prompt) <= length
        assert _solve(problem.prompt) == sorted(problem.answer.split("|"))
        assert task.grade(problem, " ".join(_solve(problem.prompt))).exact == 1.0


@BY_NAME
def test_problems_follow_from_seed_and_index_alone(task: NeedleTask) -> None:
    first, again = task.fitted(500, 6, 1, _words), task.fitted(500, 3, 1, _words)
    assert first[:3] == again
    assert len({problem.prompt for problem in first}) == 6
    assert len({problem.id for problem in first}) == 6
    others = [*task.fitted(500, 6, 2, _words), *task.fitted(500, 6, 1, _words, "train")]
    assert not {problem.answer for problem in first} & {problem.answer for problem in others}


@BY_NAME
def test_a_longer_prompt_hides_the_same_things(task: NeedleTask) -> None:
    short, long = task.fitted(500, 4, 0, _words), task.fitted(2000, 4, 0, _words)
    assert [problem.answer for problem in short] == [problem.answer for problem in long]
    assert not {problem.id for problem in short} & {problem.id for problem in long}
    assert task.new_tokens(500) == task.new_tokens(2000) == task.answer_tokens


@BY_NAME
def test_too_short_a_prompt_is_refused(task: NeedleTask) -> None:
    with pytest.raises(KvbenchError, match=rf"Task '{task.name}' has prompts of at least \d+ tokens.* --gen-len 10 "):
        task.fitted(10, 1, 0, _words)


@pytest.mark.parametrize(
    ("answer", "completion", "exact", "extracted"),
    [
        ("1234567", " 1234567.\nWhat", 1.0, "1234567"),
        ("1234567", "the number is1234567and so on", 1.0, "1234567"),
        ("1234567", "1234568", 0.0, None),
        ("1234567", "1,234,567", 0.0, None),
        ("1234567", "123 4567", 0.0, None),
        ("1234567", "", 0.0, None),
        ("1111111|2222222|3333333|4444444", "3333333, 1111111", 0.5, "1111111|3333333"),
        ("1111111|2222222|3333333|4444444", "4444444 3333333 2222222 1111111", 1.0, "1111111|2222222|3333333|4444444"),
        ("ABCDE|FGHIJ", "abcde and FGHIJ", 1.0, "ABCDE|FGHIJ"),
        ("ABCDE|FGHIJ", "ABCD E", 0.0, None),
    ],
)
def test_a_value_counts_if_the_completion_contains_it(
    answer: str, completion: str, exact: float, extracted: str | None
) -> None:
    grade = NeedleSingle().grade(Problem("x", "", answer), completion)
    assert (grade.exact, grade.extracted, grade.steps_correct) == (exact, extracted, None)


def test_needles_lie_everywhere() -> None:
    depths = []
    for problem in NeedleSingle().fitted(800, 40, 0, _words):
        lines = problem.prompt.split("\n")
        depths.append(next(i for i, line in enumerate(lines) if "magic numbers for" in line) / len(lines))
    assert min(depths) < 0.15
    assert max(depths) > 0.85
    assert len({round(depth, 2) for depth in depths}) > 20


def test_distractors_have_other_names() -> None:
    for problem in NeedleMultikey().fitted(400, 20, 0, _words):
        named = re.findall(r"for ([a-z ]+) is: (\d+)", problem.prompt)
        assert len({name for name, _ in named}) == len({number for _, number in named}) == 4


def test_the_filling_has_no_numbers_and_no_words_twice() -> None:
    assert len(filling()) > 5000
    assert not any(re.search(r"\d", line) for line in filling())
    assert len(set(ADJECTIVES)) == len(ADJECTIVES)
    assert len(set(NOUNS)) == len(NOUNS)
    assert random.Random(0).choice(filling()).strip()
