"""95 % intervals of a cell's own numbers; a problem and all its samples are one cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special, stats

LEVEL = 0.95
"""Of every interval in kvbench."""

_Z = float(special.ndtri(0.5 + LEVEL / 2))


class Estimate(NamedTuple):
    """A number and its 95 % interval; limits are None where the data do not bound it."""

    value: float
    lo: float | None
    hi: float | None


def score_interval(means: Sequence[float], samples: int = 1) -> Estimate:
    """Mean score with a Wilson interval over an effective number of problems.

    The effective n is what a binomial would need for the variance seen between problems: `problems` when the
    samples of a problem always agree, up to `problems * samples` when they are independent. At a score of 0 or 1
    nothing is seen, and n is the number of problems.

    Args:
        means: mean score of each problem, in 0..1.
        samples: completions of each problem.
    """
    problems = len(means)
    score = float(np.mean(means))
    variance = float(np.var(means, ddof=1)) / problems if problems > 1 else 0.0
    if not 0 < score < 1 or variance == 0:
        # Problems that all have the same mean say nothing about how samples vary within one.
        return wilson(score, problems)
    effective = score * (1 - score) / variance
    return wilson(score, min(max(effective, problems), problems * samples))


def ratio_interval(sums: Sequence[float], counts: Sequence[int]) -> Estimate | None:
    """Mean score of completions of which problems have different numbers, clustered by problem.

    A ratio of two sums: its variance is that of the linearised residuals (Cochran 1977, section 6.3), and the interval is
    Wilson's at the effective number of completions, as in `score_interval`, which it equals when all counts are equal.

    Args:
        sums: of the scores of each problem's completions.
        counts: of these completions; a problem may have none.

    Returns:
        None when there are no completions at all.
    """
    number = np.array(counts, dtype=float)
    scores = np.array(sums)[number > 0]
    number = number[number > 0]
    if not len(number):
        return None
    total = float(number.sum())
    score = float(scores.sum()) / total
    # As many equal problems as would vary like these, should all completions of each agree.
    least = total**2 / float((number**2).sum())
    residuals = scores - score * number
    problems = len(number)
    variance = problems / (problems - 1) * float((residuals**2).sum()) / total**2 if problems > 1 else 0.0
    if not 0 < score < 1 or variance == 0:
        return wilson(score, least)
    return wilson(score, min(max(score * (1 - score) / variance, least), total))


def wilson(score: float, n: float) -> Estimate:
    """Wilson's interval for a proportion; `n` need not be whole, which is why it is not scipy's `binomtest`."""
    centre = (score + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(score * (1 - score) / n + _Z**2 / (4 * n**2))
    return Estimate(score, min(score, max(0.0, centre - half)), max(score, min(1.0, centre + half)))


def mean_interval(means: Sequence[float], most: float = 1.0, least: float = 0.0) -> Estimate:
    """Mean of numbers in least..most, one a problem, with Student's interval; no limits when nothing varies."""
    value = float(np.mean(means))
    spread = float(stats.sem(means)) if len(means) > 1 else 0.0
    if spread == 0:
        return Estimate(value, None, None)
    lo, hi = stats.t.interval(LEVEL, len(means) - 1, loc=value, scale=spread)
    return Estimate(value, max(least, float(lo)), min(most, float(hi)))


def pass_at_k(correct: Sequence[int], samples: int, k: int) -> Estimate:
    """Probability that one of k completions is right, without bias; `correct` is how many of `samples` are, per problem.

    Of n samples there are n // k disjoint draws, which bounds what they can tell beyond one draw a problem.
    """
    missed = [special.comb(samples - right, k) / special.comb(samples, k) for right in correct]
    return score_interval([1 - float(share) for share in missed], samples // k)
