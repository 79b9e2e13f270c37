from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvbench.core.result import Result
from kvbench.report.load import Stored
from kvbench.report.paired import paired

Make = Callable[..., Any]
KEPT = {"slots": 19, "cr": "7/8"}


def row_of(stored: Stored, policy: str, task: str = "chain", lm: str | None = None) -> Result:
    rows = [r for r in paired(stored) if (r.policy, r.task) == (policy, task) and (lm is None or r.adapted_lm == lm)]
    return rows[0]


def test_a_policy_is_compared_with_the_base_model(grid: Stored) -> None:
    row = row_of(grid, "tova")
    assert row.relative == pytest.approx(1 / 3)
    assert row.relative_lo is not None
    assert row.relative_hi is not None
    assert row.relative_lo < 1 / 3 < row.relative_hi
    assert row.relative_adapted is None


def test_a_trained_policy_is_compared_with_both(grid: Stored) -> None:
    row = row_of(grid, "kvpop")
    assert row.relative == pytest.approx(2 / 3)
    assert row.relative_adapted == pytest.approx(1.0)


def test_the_adapted_twin_says_what_adapting_did(grid: Stored) -> None:
    row = row_of(grid, "full", lm="c1")
    assert row.relative == pytest.approx(2 / 3)
    assert row.relative_adapted == 1.0


def test_the_base_model_is_itself(grid: Stored) -> None:
    row = row_of(grid, "full")
    assert (row.relative, row.relative_lo, row.relative_hi) == (1.0, 1.0, 1.0)


def test_what_failed_or_was_skipped_has_no_numbers(grid: Stored) -> None:
    assert row_of(grid, "random").relative is None
    assert row_of(grid, "streaming_llm").relative is None


def test_other_problems_are_never_paired(make_row: Make, make_stored: Make) -> None:
    stored = make_stored(make_row([1, 1]), make_row([1, 0], policy="tova", seed=1, **KEPT))
    assert row_of(stored, "tova").relative is None


def test_nothing_is_a_share_of_nothing(make_row: Make, make_stored: Make) -> None:
    stored = make_stored(make_row([0, 0]), make_row([1, 0], policy="tova", **KEPT))
    assert [row.relative for row in paired(stored)] == [None, None]


def alarms(*pairs: Any, make_stored: Make) -> dict[str, tuple[str, ...]]:
    return {row.policy: row.alarms for row in paired(make_stored(*pairs))}


def test_no_alarm_without_reason(grid: Stored) -> None:
    assert [row.alarms for row in paired(grid)] == [()] * len(grid.rows)


def test_no_eviction_although_the_budget_binds(make_row: Make, make_stored: Make) -> None:
    row, grades = make_row([1, 0], policy="tova", **KEPT)
    found = alarms(make_row([1, 1]), (replace(row, evictions=0), grades), make_stored=make_stored)
    assert found["tova"] == ("no eviction although the budget binds",)


def test_nothing_evicted_has_to_be_dense(make_row: Make, make_stored: Make) -> None:
    row, grades = make_row([1, 1], policy="tova", slots=150)
    unlike = alarms(make_row([1, 1], text="x"), (replace(row, evictions=0), grades), make_stored=make_stored)
    assert unlike["tova"] == ("nothing was evicted, yet completions differ from dense without a near-tie (2)",)
    tied = [replace(grade, near_ties=1) for grade in grades]
    assert alarms(make_row([1, 1], text="x"), (replace(row, evictions=0), tied), make_stored=make_stored)["tova"] == ()


def test_dense_worse_than_compressed(make_row: Make, make_stored: Make) -> None:
    found = alarms(
        make_row([1] * 10 + [0] * 30), make_row([1] * 38 + [0] * 2, policy="tova", **KEPT), make_stored=make_stored
    )
    assert found["tova"] == ("dense is worse than compressed beyond the interval",)


def test_two_policies_that_write_the_same(make_row: Make, make_stored: Make) -> None:
    def pair(scores: list[int]) -> dict[str, tuple[str, ...]]:
        both = [make_row(scores, policy=policy, text="same", **KEPT) for policy in ("tova", "random")]
        return alarms(make_row([1, 1]), *both, make_stored=make_stored)

    assert pair([1, 0])["tova"] == ("every completion is identical to random's",)
    assert pair([1, 1])["tova"] == ()


def test_slower_than_dense(make_row: Make, make_stored: Make) -> None:
    row, grades = make_row([1, 1], policy="tova", **KEPT)
    dense = make_row([1, 1])
    found = alarms(dense, (replace(row, tokens_per_s=94.0), grades), make_stored=make_stored)
    assert found["tova"] == ("slower than dense",)
    within_noise = alarms(dense, (replace(row, tokens_per_s=96.0), grades), make_stored=make_stored)
    assert within_noise["tova"] == ()


def test_random_weights_say_nothing_about_quality(make_row: Make, make_stored: Make) -> None:
    row, grades = make_row([1, 1])
    found = alarms((replace(row, random_weights=True), grades), make_stored=make_stored)
    assert found["full"] == ("random weights: cost only",)
