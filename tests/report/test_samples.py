"""Numbers over several completions of a problem, against definitions worked out by brute force."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from kvbench.core.intervals import mean_interval, ratio_interval, score_interval, wilson
from kvbench.core.result import GradeRecord, Result
from kvbench.core.samples import ends, groups, majority, pass_at
from kvbench.report.load import Stored
from kvbench.report.tables import frame, render


def grade(
    problem: str, sample: int, answer: str | None, right: str, tokens: int = 8, finished: bool = True
) -> GradeRecord:
    return GradeRecord(
        key="cell",
        problem=problem,
        sample=sample,
        correct=float(answer == right),
        steps_correct=None,
        tokens=tokens,
        finished=finished,
        near_ties=0,
        digest=f"{problem}{sample}",
        extracted=answer,
    )


def answers(*problems: Sequence[str | None]) -> list[GradeRecord]:
    """Each problem's right answer is 7."""
    return [grade(f"p{n}", i, answer, "7") for n, given in enumerate(problems) for i, answer in enumerate(given)]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(k: int) -> None:
    given: list[list[str | None]] = [
        ["7", "1", "1", "7"],
        ["1", "2", None, "3"],
        ["7", "7", "7", "7"],
        ["2", "2", "7", "2"],
    ]
    brute = [np.mean(["7" in draw for draw in combinations(problem, k)]) for problem in given]
    found = pass_at(groups(answers(*given)), k)
    assert found is not None
    assert found.value == pytest.approx(np.mean(brute))
    assert found.lo is not None
    assert found.hi is not None
    assert found.lo < found.value < found.hi
    assert found == score_interval([float(share) for share in brute], 4 // k)


def test_pass_at_1_is_the_score_and_pass_at_n_a_plain_proportion() -> None:
    completions = groups(answers(["7", "1"], ["1", "1"], ["7", "7"], ["7", "2"]))
    assert pass_at(completions, 1) == score_interval([0.5, 0, 1, 0.5], 2)
    assert pass_at(completions, 2) == pytest.approx(wilson(0.75, 4))
    assert pass_at(completions, 3) is None
    assert pass_at([], 1) is None


@pytest.mark.parametrize(
    ("given", "right"),
    [
        (["7", "7", "1"], 1),
        (["1", "1", "7"], 0),
        (["7", "1"], 1),  # a tie: the first seen
        (["1", "7"], 0),
        (["1", "7", "7", "1"], 0),
        ([None, "7", None], 1),  # no answer is no vote
        ([None, None, None], 0),
    ],
)
def test_the_most_frequent_answer_decides(given: list[str | None], right: int) -> None:
    found = majority(groups(answers(given, ["7"] * len(given))))
    assert found is not None
    assert found.value == (right + 1) / 2


def test_samples_vote_in_their_order_however_they_are_stored() -> None:
    found = majority(groups(reversed(answers(["7", "1"]))))
    assert found is not None
    assert found.value == 1


def test_without_any_answer_there_is_no_vote() -> None:
    assert majority(groups(answers([None, None]))) is None


def test_how_completions_ended() -> None:
    grades = [
        grade("a", 0, "7", "7", tokens=4),
        grade("a", 1, None, "7", tokens=10, finished=False),
        grade("b", 0, "1", "7", tokens=6),
        grade("b", 1, "7", "7", tokens=10, finished=False),  # right before it was cut off
    ]
    found = ends(groups(grades))
    assert found.finished is not None
    assert found.finished.value == 0.5
    assert found.truncated == score_interval([0.5, 0.5], 2)
    assert found.length == mean_interval([7.0, 8.0], most=100)
    nothing = ends(groups([grade("a", 0, None, "7", finished=False)]))
    assert nothing.finished is None
    assert nothing.truncated.value == 1


def test_a_ratio_of_equal_counts_is_the_score() -> None:
    means = [0.5, 0.25, 0.0, 0.75, 1.0, 0.5]
    assert ratio_interval([4 * mean for mean in means], [4] * 6) == pytest.approx(score_interval(means, 4))
    assert ratio_interval([3.0, 0.0], [3, 0]) == wilson(1.0, 1)
    assert ratio_interval([0.0], [0]) is None


def test_coverage_with_unequal_counts() -> None:
    """Problems differ in difficulty, and hard ones finish less often; the interval has to hold the ratio's truth."""
    rng = np.random.default_rng(0)
    kinds = np.array([0.2, 0.5, 0.9])
    truth = float((kinds * kinds).sum() / kinds.sum())  # right with probability p, finished with probability p
    hits, runs = 0, 600
    for _ in range(runs):
        difficulty = rng.choice(kinds, size=40)
        counts = rng.binomial(4, difficulty)
        found = ratio_interval(rng.binomial(counts, difficulty).astype(float).tolist(), counts.tolist())
        assert found is not None
        assert found.lo is not None
        assert found.hi is not None
        hits += found.lo <= truth <= found.hi
    assert 0.92 <= hits / runs <= 0.985


@pytest.fixture
def sampled(make_row: Callable[..., tuple[Result, list[GradeRecord]]], make_stored: Callable[..., Stored]) -> Stored:
    row, _ = make_row([1.0, 0.5], samples=2)
    grades = [replace(one, key=row.key) for one in answers(["7", "7"], ["1", "7"])]
    return make_stored((row, grades))


def test_tables_show_them(sampled: Stored) -> None:
    for text in (render(sampled, "text"), render(sampled, "md")):
        for word in ("pass@2 [95 %]", "maj@2 [95 %]", "finished [95 %]", "truncated", "tokens", "pass@k: a problem"):
            assert word in text
        assert "pass@1" not in text.replace("score is pass@1", "")
    assert "pass@1 [95 %]" in render(sampled, ks=(1, 2))


def test_rows_have_columns_for_the_chosen_k(sampled: Stored) -> None:
    (record,) = json.loads(render(sampled, "json", ks=(1, 2, 3)))
    assert (record["pass_at_1"], record["pass_at_2"], record["pass_at_3"]) == (0.75, 1.0, None)
    assert record["pass_at_1_lo"] < 0.75 < record["pass_at_1_hi"]
    (line,) = csv.DictReader(io.StringIO(render(sampled, "csv", ks=(1, 3))))
    assert (line["pass_at_1"], line["pass_at_3"]) == ("0.75", "")
    assert list(frame(sampled).columns) == list(frame(Stored((), {})).columns)


def test_one_sample_of_a_generated_task_needs_no_such_table(grid: Stored) -> None:
    assert "How answers ended" not in render(grid)
