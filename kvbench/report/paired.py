"""Fills in what needs a second row: relative scores to both dense twins, and alarms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvbench.core.intervals import Estimate
from kvbench.core.result import GradeRecord, Result
from kvbench.report.load import Grades, Stored
from kvbench.report.statistics import problem_means, relative_score

_ITSELF = Estimate(1.0, 1.0, 1.0)

_NOTICEABLY = 0.95
"""Share of the dense speed below which a row is called slower: less is noise where the arithmetic is small."""

_SAME_LIKELIHOOD = 1e-3
"""Nats a token by which rounding may make scored documents differ from dense."""


@dataclass(frozen=True)
class Twins:
    """The dense rows that a row is compared with; None where there is none."""

    base: Result | None
    adapted: Result | None


def find_twins(row: Result, rows: Iterable[Result]) -> Twins:
    """The measured dense rows on the same problems: on the base model, and on the LM that the row ran on."""
    base = adapted = None
    for other in rows:
        if other.twin_key != row.twin_key or other.status != "ok":
            continue
        if other.role == "dense":
            base = other
        elif other.role == "dense_adapted" and other.adapted_lm == row.adapted_lm:
            adapted = other
    return Twins(base, adapted)


def paired(stored: Stored) -> list[Result]:
    """All rows with relative scores and alarms, in the order of the store."""
    compared = [_compared(row, find_twins(row, stored.rows), stored.grades) for row in stored.rows]
    return [replace(row, alarms=tuple(_alarms(row, compared, stored.grades))) for row in compared]


def _compared(row: Result, twins: Twins, grades: Grades) -> Result:
    base = _against(row, twins.base, grades)
    adapted = _against(row, twins.adapted, grades)
    return replace(
        row,
        relative=base.value if base is not None else None,
        relative_lo=base.lo if base is not None else None,
        relative_hi=base.hi if base is not None else None,
        relative_adapted=adapted.value if adapted is not None else None,
        relative_adapted_lo=adapted.lo if adapted is not None else None,
        relative_adapted_hi=adapted.hi if adapted is not None else None,
    )


def _against(row: Result, twin: Result | None, grades: Grades) -> Estimate | None:
    # The score of a document is relative to the dense model as it is.
    if twin is None or row.status != "ok" or row.nll is not None:
        return None
    if twin.key == row.key:
        # Nothing is a share of nothing.
        return _ITSELF if row.score else None
    return relative_score(problem_means(grades[row.key]), problem_means(grades[twin.key]), row.samples)


def _alarms(row: Result, rows: Sequence[Result], grades: Grades) -> list[str]:
    """What looks wrong; nobody is judged by it, but a reader should look."""
    if row.status != "ok":
        return []
    found = ["random weights: cost only"] if row.random_weights else []
    if row.role != "policy":
        return found
    twins = find_twins(row, rows)
    own = twins.base if row.adapted_lm is None else twins.adapted
    if row.evictions == 0:
        found += _without_eviction(row, own, grades)
    if row.relative_lo is not None and row.relative_lo > 1:
        found.append("dense is worse than compressed beyond the interval")
    twins_in_output = [other for other in rows if _same_output(row, other, grades)]
    found += [f"every completion is identical to {other.policy}'s" for other in twins_in_output]
    if twins.base is not None and _slower(row, twins.base):
        found.append("slower than dense")
    return found


def _without_eviction(row: Result, own: Result | None, grades: Grades) -> list[str]:
    found = []
    longest = max((grade.tokens for grade in grades.get(row.key, ())), default=0) + (row.prompt_length or 0)
    # The last token is written but never read, so it never needs a slot.
    if row.budget is not None and longest - 1 > row.budget:
        found.append("no eviction although the budget binds")
    elif row.nll_excess is not None:
        if row.adapted_lm is None and abs(row.nll_excess) > _SAME_LIKELIHOOD:
            found.append("nothing was evicted, yet documents are not as likely as to the dense model")
    elif own is not None and row.metrics is None:  # log-likelihoods differ in their last digits
        theirs = {(grade.problem, grade.sample): grade for grade in grades.get(own.key, ())}
        mine = grades.get(row.key, ())
        changed = [grade for grade in mine if _differs_without_reason(grade, theirs.get((grade.problem, grade.sample)))]
        if changed:
            found.append(f"nothing was evicted, yet completions differ from dense without a near-tie ({len(changed)})")
    return found


def _differs_without_reason(mine: GradeRecord, theirs: GradeRecord | None) -> bool:
    return theirs is not None and mine.digest != theirs.digest and mine.near_ties == theirs.near_ties == 0


def _same_output(row: Result, other: Result, grades: Grades) -> bool:
    """Two policies that evict and err alike are one policy; two that are always right prove nothing."""
    if other.role != "policy" or other.policy == row.policy or other.status != "ok":
        return False
    if (other.twin_key, other.budget, other.adapted_lm) != (row.twin_key, row.budget, row.adapted_lm):
        return False
    if not row.evictions or not other.evictions or row.score == 1:
        return False
    mine = {(grade.problem, grade.sample): grade.digest for grade in grades.get(row.key, ())}
    return bool(mine) and mine == {(grade.problem, grade.sample): grade.digest for grade in grades.get(other.key, ())}


def _slower(row: Result, dense: Result) -> bool:
    if row.tokens_per_s is None or dense.tokens_per_s is None:
        return False
    return row.tokens_per_s < _NOTICEABLY * dense.tokens_per_s
