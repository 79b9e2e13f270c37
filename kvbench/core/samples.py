"""What several completions of a problem say together: pass@k, majority votes, and how they ended.

Each number has a 95 % interval in which a problem with all its completions is one cluster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.core.intervals import Estimate, mean_interval, pass_at_k, ratio_interval, score_interval
from kvbench.core.result import GradeRecord

Groups = Sequence[Sequence[GradeRecord]]
"""The completions of each problem, in the order of their samples."""


@dataclass(frozen=True)
class Ends:
    """How completions ended.

    Attributes:
        finished: score of those that ended by themselves; None when none did.
        truncated: share of those that ended at the cap.
        length: mean tokens.
    """

    finished: Estimate | None
    truncated: Estimate
    length: Estimate


def groups(grades: Iterable[GradeRecord]) -> list[list[GradeRecord]]:
    """The completions of each problem of each cell, in the order of their samples."""
    found: dict[tuple[str, str], list[GradeRecord]] = {}
    for grade in sorted(grades, key=lambda grade: grade.sample):
        found.setdefault((grade.key, grade.problem), []).append(grade)
    return list(found.values())


def pass_at(completions: Groups, k: int) -> Estimate | None:
    """Unbiased pass@k (Chen et al. 2021, equation 1); None where a problem has fewer than k completions."""
    samples = min(map(len, completions), default=0)
    if samples < k:
        return None
    return pass_at_k([sum(grade.correct == 1 for grade in group) for group in completions], samples, k)


def majority(completions: Groups) -> Estimate | None:
    """Share of problems whose most frequent answer is right; None when no completion of any gave one.

    Answers are the same when the grader wrote them alike. Of equally frequent ones that counts which came first;
    completions without an answer have no vote, and a problem without votes is not solved.
    """
    if not any(grade.extracted is not None for group in completions for grade in group):
        return None
    return score_interval([_voted(group) for group in completions])


def ends(completions: Groups) -> Ends:
    """How completions ended."""
    samples = max(map(len, completions))
    done = [[grade.correct for grade in group if grade.finished] for group in completions]
    return Ends(
        finished=ratio_interval([math.fsum(scores) for scores in done], [len(scores) for scores in done]),
        truncated=score_interval(
            [1 - len(d) / len(group) for d, group in zip(done, completions, strict=True)], samples
        ),
        length=mean_interval([float(np.mean([g.tokens for g in group])) for group in completions], most=math.inf),
    )


def _voted(group: Sequence[GradeRecord]) -> float:
    votes = Counter(grade.extracted for grade in group if grade.extracted is not None)
    if not votes:
        return 0.0
    # A counter keeps the order in which it first saw things, also among equals.
    winner = votes.most_common(1)[0][0]
    return float(next(grade.correct for grade in group if grade.extracted == winner) == 1)
