"""Scores relative to a dense twin: a ratio of means, paired by problem."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from kvbench.core.intervals import Estimate, score_interval
from kvbench.core.result import GradeRecord

ProblemMeans = Mapping[str, float]
"""Problem -> mean score of its samples."""


def problem_means(grades: Iterable[GradeRecord]) -> dict[str, float]:
    """Mean score of each problem, in the order of the problems' names."""
    scores: dict[str, list[float]] = defaultdict(list)
    for grade in grades:
        scores[grade.problem].append(grade.correct)
    return {problem: float(np.mean(scores[problem])) for problem in sorted(scores)}


def relative_score(policy: ProblemMeans, dense: ProblemMeans, samples: int = 1) -> Estimate | None:
    """Ratio of mean scores over the problems that both rows have, with a paired 95 % interval.

    MOVER-R (Donner and Zou 2012, Stat. Methods Med. Res. 21, 347): the limits of the ratio follow from the two Wilson
    intervals and the correlation between the problems' scores. Unlike a delta method or a bootstrap it stays honest
    at 0 and 1, where resampling sees no variance.

    Returns:
        None without common problems or when the dense model solves none; an upper limit of None when the dense score is
        not clearly above zero.
    """
    common = sorted(policy.keys() & dense.keys())
    if not common:
        return None
    mine = np.array([policy[problem] for problem in common])
    theirs = np.array([dense[problem] for problem in common])
    if theirs.mean() == 0:
        return None
    varies = mine.std() > 0 and theirs.std() > 0
    correlation = float(np.corrcoef(mine, theirs)[0, 1]) if varies else 0.0
    return _mover_ratio(score_interval(mine.tolist(), samples), score_interval(theirs.tolist(), samples), correlation)


def _mover_ratio(upper: Estimate, lower: Estimate, correlation: float) -> Estimate:
    """The ratio of two estimates whose intervals are known; `correlation` is that of the estimates."""
    a, b = upper.value, lower.value
    a_lo, a_hi = _limits(upper)
    b_lo, b_hi = _limits(lower)
    lo = _root(a * b - correlation * (a - a_lo) * (b_hi - b), a_lo * (2 * a - a_lo), b_hi * (2 * b - b_hi), sign=-1)
    hi = _root(a * b - correlation * (a_hi - a) * (b - b_lo), a_hi * (2 * a - a_hi), b_lo * (2 * b - b_lo), sign=1)
    ratio = a / b
    return Estimate(ratio, min(ratio, max(0.0, lo or 0.0)), None if hi is None else max(ratio, hi))


def _root(middle: float, product: float, square: float, sign: int) -> float | None:
    """A root of `square x^2 - 2 middle x + product`; None when the denominator's interval is too wide to have one."""
    if square <= 0:
        return None
    return (middle + sign * math.sqrt(max(0.0, middle**2 - product * square))) / square


def _limits(estimate: Estimate) -> tuple[float, float]:
    if estimate.lo is None or estimate.hi is None:
        raise ValueError("a score interval always has both limits")
    return estimate.lo, estimate.hi
