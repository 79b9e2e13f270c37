from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvbench.report.statistics import relative_score


def means(values: object) -> dict[str, float]:
    return {str(index): float(value) for index, value in enumerate(np.asarray(values, dtype=float))}


def test_the_ratio_of_means_over_common_problems() -> None:
    policy = {"a": 1.0, "b": 0.0, "c": 1.0, "only here": 1.0}
    dense = {"a": 1.0, "b": 1.0, "c": 1.0, "only there": 0.0}
    found = relative_score(policy, dense)
    assert found is not None
    assert found.value == pytest.approx(2 / 3)


def test_nothing_to_divide_by() -> None:
    assert relative_score(means([1, 0]), means([0, 0])) is None
    assert relative_score({"a": 1.0}, {"b": 1.0}) is None
    assert relative_score({}, {}) is None


def test_against_a_perfect_twin_zero_right_is_bounded_like_a_proportion() -> None:
    found = relative_score(means([0] * 32), means([1] * 32))
    assert found is not None
    assert (found.value, found.lo) == (0.0, 0.0)
    assert found.hi is not None
    alone = stats.binomtest(0, 32).proportion_ci(method="wilson").high
    assert alone <= found.hi <= 1.1 * alone


def test_all_right_against_all_right_has_room_on_both_sides() -> None:
    found = relative_score(means([1] * 32), means([1] * 32))
    assert found is not None
    assert found.value == 1.0
    assert found.lo == pytest.approx(0.89, abs=0.01)
    assert found.hi == pytest.approx(1 / 0.89, abs=0.01)


def test_pairing_narrows_the_interval() -> None:
    rng = np.random.default_rng(0)
    dense = rng.random(200) < 0.6
    paired = dense & (rng.random(200) < 0.9)
    unpaired = rng.permutation(paired)
    together = relative_score(means(paired), means(dense))
    apart = relative_score(means(unpaired), means(dense))
    assert together is not None
    assert apart is not None
    assert together.hi is not None
    assert together.lo is not None
    assert apart.hi is not None
    assert apart.lo is not None
    assert together.value == apart.value
    assert together.hi - together.lo < 0.7 * (apart.hi - apart.lo)


def test_a_weak_twin_leaves_the_ratio_unbounded() -> None:
    found = relative_score(means([1, 0, 0, 0]), means([0, 1, 0, 0]))
    assert found is not None
    assert found.hi is None or found.hi > 5
    assert found.lo is not None
    assert found.lo < 0.5


@pytest.mark.parametrize(
    ("dense_rate", "kept", "n", "samples"),
    [(0.98, 0.9, 32, 1), (0.98, 0.05, 32, 1), (0.6, 0.7, 200, 1), (0.7, 0.8, 60, 4)],
)
def test_coverage(dense_rate: float, kept: float, n: int, samples: int) -> None:
    """The policy keeps a share of what dense solves; the interval has to hold that share about 95 times in 100."""
    rng = np.random.default_rng(1)
    hits, runs = 0, 600
    for _ in range(runs):
        spread = rng.beta(4 * dense_rate, 4 * (1 - dense_rate), size=n) if samples > 1 else np.full(n, dense_rate)
        dense = rng.random((samples, n)) < spread
        policy = dense & (rng.random((samples, n)) < kept)
        found = relative_score(means(policy.mean(0)), means(dense.mean(0)), samples)
        assert found is not None
        assert found.lo is not None
        hits += found.lo <= kept <= (np.inf if found.hi is None else found.hi)
    assert hits / runs >= 0.92
