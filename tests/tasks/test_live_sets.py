"""What a solution still needs, and that the scored levels are possible for a perfect policy but not for recency."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench_tasks.live_set_report import COLUMNS, LiveSet, line, measure
from kvbench_tasks.reference_task import LEVELS, ReferenceTask
from tests.tasks.families import FAMILIES, PROBLEMS

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference_tasks.md"
SCORED = (512, 1024, 2048, 4096)
BY_NAME = pytest.mark.parametrize("task", FAMILIES, ids=lambda task: task.name)

_MEASURED: dict[tuple[str, int], LiveSet] = {}


def _measured(task: ReferenceTask, level: int) -> LiveSet:
    key = (task.name, level)
    if key not in _MEASURED:
        _MEASURED[key] = measure(task, level)
    return _MEASURED[key]


@BY_NAME
@pytest.mark.parametrize("level", SCORED)
def test_scored_levels_fit_by_the_strict_rule(task: ReferenceTask, level: int) -> None:
    row = _measured(task, level)
    assert 2 * row.live <= row.slots
    assert row.beyond == 1
    assert row.fits


def test_the_rule_is_strict() -> None:
    fits = LiveSet("x", 512, 6, 3, 27, (497, 497), live=20, reach=200, beyond=1.0, slots=40, budget=100)
    assert fits.fits
    for changes in ({"live": 21}, {"beyond": 0.99}, {"slots": 39}):
        values = {name: getattr(fits, name) for name in LiveSet.__slots__}
        assert not LiveSet(**{**values, **changes}).fits


@BY_NAME
def test_the_document_has_what_is_measured(task: ReferenceTask) -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    assert f"| {' | '.join(COLUMNS)} |" in lines
    for level in LEVELS:
        assert line(_measured(task, level)) in lines


@BY_NAME
@pytest.mark.parametrize("level", LEVELS)
def test_every_word_follows_from_the_words_it_is_said_to_use(task: ReferenceTask, level: int) -> None:
    """In all solutions of a family, the same place in a step and the same used words are followed by the same word.

    So nothing that a solution needs is missing from its live set.
    """
    seen: dict[tuple[int, bool, tuple[str, ...]], str] = {}
    count = min(PROBLEMS[level], 10) if level > 512 else 60
    for problem in task.problems(level, count, seed=2):
        trace = task.trace(problem)
        uses: dict[int, list[int]] = {}
        for use, source in trace.uses:
            assert 0 <= source < use
            assert use >= trace.prompt_len
            uses.setdefault(use, []).append(source)
        place, answering = 0, False
        for at in range(trace.prompt_len, len(trace.tokens)):
            word = trace.tokens[at]
            # A step has one length; `#` or `answer` after its last word follows from the count.
            known = tuple(trace.tokens[source] for source in uses.get(at, ()))
            assert seen.setdefault((place, answering, known), word) == word, (problem.id, at)
            place += 1
            answering = answering or word == "answer"
            if not answering and word == ";" and trace.tokens[at - 4] == "=":
                place = 0


@BY_NAME
def test_changing_a_number_of_the_prompt_changes_first_a_word_that_uses_it(task: ReferenceTask) -> None:
    problem = task.problem(512, 0, seed=3)
    tokens = problem.prompt.split()
    before = task.solve(problem.prompt)
    start = tokens.index(":")
    changed = 0
    for at, word in enumerate(tokens):
        if at < start or not word.isdigit():
            continue
        other = [*tokens]
        other[at] = str((int(word) + 1) % 10)
        after = task.solve(" ".join(other))
        first = next((q for q in range(len(tokens), len(before.tokens)) if before.tokens[q] != after.tokens[q]), None)
        if first is not None:
            changed += 1
            assert (first, at) in before.uses
            assert (first, at) in after.uses
    assert changed >= 6
