from __future__ import annotations

from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from kvbench.core.intervals import mean_interval, pass_at_k, score_interval, wilson


@pytest.mark.parametrize(("right", "n"), [(0, 10), (3, 10), (10, 10), (81, 200)])
def test_wilson_is_scipys_where_n_is_whole(right: int, n: int) -> None:
    expected = stats.binomtest(right, n).proportion_ci(method="wilson")
    found = wilson(right / n, n)
    assert (found.lo, found.hi) == pytest.approx((expected.low, expected.high))


def test_one_sample_a_problem_is_wilson_over_problems() -> None:
    means = [1.0] * 7 + [0.0] * 13
    assert score_interval(means) == wilson(0.35, 20)


def test_samples_that_always_agree_count_once() -> None:
    assert score_interval([1.0] * 7 + [0.0] * 13, samples=8) == wilson(0.35, 20)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_at_the_edges_n_is_the_number_of_problems(score: float) -> None:
    assert score_interval([score] * 20, samples=8) == wilson(score, 20)


def test_more_independent_samples_narrow_the_interval_at_most_to_all_completions() -> None:
    means = [0.5, 0.25, 0.5, 0.75, 0.5, 0.5, 0.25, 0.75]
    one, four = score_interval(means, 1), score_interval(means, 4)
    assert one == wilson(0.5, 8)
    assert four == wilson(0.5, 32)


def test_coverage_with_clusters() -> None:
    """Problems differ in difficulty; the interval has to hold the truth about 95 times in 100."""
    rng = np.random.default_rng(0)
    hits, runs = 0, 800
    for _ in range(runs):
        difficulty = rng.beta(1.5, 1, size=40)
        means = rng.binomial(4, difficulty) / 4
        found = score_interval(means.tolist(), 4)
        assert found.lo is not None
        assert found.hi is not None
        hits += found.lo <= 0.6 <= found.hi
    assert 0.92 <= hits / runs <= 0.98


def test_mean_interval_is_students() -> None:
    found = mean_interval([0.2, 0.4, 0.6])
    assert found.value == pytest.approx(0.4)
    assert found.hi == pytest.approx(0.4 + 4.302653 * 0.2 / 3**0.5)
    assert found.lo == 0.0  # never below what a share can be
    assert mean_interval([0.5, 0.5]) == (0.5, None, None)
    assert mean_interval([0.5]) == (0.5, None, None)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(k: int) -> None:
    outcomes = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    brute = [np.mean([any(draw) for draw in combinations(problem, k)]) for problem in outcomes]
    assert pass_at_k([sum(problem) for problem in outcomes], 5, k).value == pytest.approx(np.mean(brute))


def test_the_level_is_95() -> None:
    z = NormalDist().inv_cdf(0.975)
    large = wilson(0.5, 10**8)
    assert large.hi == pytest.approx(0.5 + z * 0.5 / 10**4)
