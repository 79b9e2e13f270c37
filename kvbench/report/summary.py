"""Rows to the lines that people read: one a policy and ratio, its tasks pooled, the held-out family apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvbench.core.cell import Role
from kvbench.core.intervals import Estimate, score_interval
from kvbench.core.result import Result
from kvbench.core.samples import Ends, ends, groups, majority, pass_at
from kvbench.report.load import Grades
from kvbench.report.paired import find_twins
from kvbench.report.statistics import problem_means, relative_score

_ROLES: tuple[Role, ...] = ("dense", "dense_adapted", "policy")
"""Dense rows first, the base model before the others."""


class Conditions(NamedTuple):
    """What rows have to share to stand in one table."""

    model: str
    weights_hash: str
    dtype: str
    device: str
    gen_length: int
    n: int
    samples: int
    temperature: float
    top_p: float
    top_k: int
    rows: int


class _Line(NamedTuple):
    """What the rows of one line share."""

    requested: str
    policy: str
    policy_args: str
    checkpoint: str | None
    adapted_lm: str | None


@dataclass(frozen=True)
class Documents:
    """Scored documents of a line.

    Attributes:
        nll, excess, kl: nats a token: negative log-likelihood, the same less the dense model's, KL from the dense model.
        top1: share of tokens at which both have the same favourite.
        feeding: how they were fed.
    """

    nll: float
    excess: Estimate
    kl: Estimate
    top1: float
    feeding: str


@dataclass(frozen=True)
class Line:
    """One policy at one ratio.

    Attributes:
        label: of the policy; `policy @trained` on the LM that was trained with policy `trained`.
        role: as in the rows.
        requested: ratio or slots as asked for.
        tasks: relative score by task; on the line of the base model its score.
        n: problems of the tasks that policies trained on.
        trained, held_out: relative score over all problems of the tasks that policies trained on, and of the others.
        of_lm: the first against the dense twin on the same adapted LM.
        score, steps: exact answers and share of steps right before the first error, over the trained tasks.
        passes: k -> pass@k over the trained tasks; None where there are fewer samples.
        majority: share of their problems whose most frequent answer is right.
        ends: how their completions ended; None where nothing was measured or grades are missing.
        documents: what was measured on scored documents, which are in none of the above but `tasks`.
        cr_mean: achieved ratio, mean over rows.
        cr_peak: achieved ratio at the fullest step of any row.
        kv_bytes, scorer_bytes, ms_per_step, tokens_per_s: means over rows.
        notes: failures, skips and alarms -> tasks.
    """

    label: str
    role: str
    requested: str
    tasks: dict[str, Estimate | None]
    n: int
    trained: Estimate | None
    held_out: Estimate | None
    of_lm: Estimate | None
    score: Estimate | None
    steps: float | None
    passes: Mapping[int, Estimate | None]
    majority: Estimate | None
    ends: Ends | None
    documents: Documents | None
    cr_mean: float | None
    cr_peak: float | None
    kv_bytes: float | None
    scorer_bytes: float | None
    ms_per_step: float | None
    tokens_per_s: float | None
    notes: Mapping[str, Sequence[str]]


def conditions(row: Result) -> Conditions:
    """Of one row."""
    return Conditions(
        row.model,
        row.weights_hash,
        row.dtype,
        row.device,
        row.gen_length,
        row.n,
        row.samples,
        row.temperature,
        row.top_p,
        row.top_k,
        row.rows,
    )


def summarise(rows: Sequence[Result], grades: Grades, ks: Sequence[int] = ()) -> list[tuple[Conditions, list[Line]]]:
    """Tables of comparable lines, short generations first: by ratio, dense rows first, then by name.

    Args:
        rows: of all tables.
        grades: of the rows.
        ks: for which pass@k is wanted.
    """
    tables: dict[Conditions, dict[_Line, list[Result]]] = {}
    for row in rows:
        tables.setdefault(conditions(row), {}).setdefault(_line(row), []).append(row)
    # Sorting is stable, so that what is equal keeps its order, here and below.
    ordered = sorted(tables.items(), key=lambda table: table[0].gen_length)
    return [(shared, _lines(lines, rows, grades, ks)) for shared, lines in ordered]


def _lines(lines: dict[_Line, list[Result]], rows: Sequence[Result], grades: Grades, ks: Sequence[int]) -> list[Line]:
    # The same slots are another ratio on each task. Names decide the rest: the order in which cells ended means nothing.
    summaries = [(min(m.cr for m in members), _summary(members, rows, grades, ks)) for members in lines.values()]
    return [
        line for _, line in sorted(summaries, key=lambda pair: (pair[0], _ROLES.index(pair[1].role), pair[1].label))
    ]


def _line(row: Result) -> _Line:
    return _Line(
        _requested(row),
        row.policy,
        row.policy_args,
        row.checkpoint,
        row.adapted_lm,
    )


def _requested(row: Result) -> str:
    if row.budget is None:
        return "0"
    return row.cr_requested or f"{row.budget} slots"


def _summary(members: Sequence[Result], rows: Sequence[Result], grades: Grades, ks: Sequence[int]) -> Line:
    first = members[0]
    measured = [row for row in members if row.status == "ok"]
    graded = [row for row in measured if row.nll is None]
    trained = [row for row in graded if not row.held_out]
    held_out = [row for row in graded if row.held_out]
    completions = groups(grade for row in trained for grade in grades.get(row.key, ()))
    return Line(
        label=_label(first, rows),
        role=first.role,
        requested=_requested(first),
        tasks={task: _task(task, measured, rows, grades) for task in sorted({row.task for row in members})},
        n=sum(row.n for row in trained),
        trained=_pooled(trained, rows, grades, adapted=False),
        held_out=_pooled(held_out, rows, grades, adapted=False),
        of_lm=_pooled(trained, rows, grades, adapted=True) if first.role == "policy" else None,
        score=_score(trained, grades),
        steps=_mean(trained, lambda row: row.steps_correct),
        passes={k: pass_at(completions, k) for k in ks},
        majority=majority(completions),
        ends=ends(completions) if completions else None,
        cr_mean=_mean(measured, lambda row: row.cr_mean),
        cr_peak=min((row.cr_peak for row in measured if row.cr_peak is not None), default=None),
        kv_bytes=_mean(measured, lambda row: row.kv_bytes),
        scorer_bytes=_mean(measured, lambda row: row.scorer_bytes),
        ms_per_step=_mean(measured, lambda row: row.ms_per_step),
        tokens_per_s=_speed(measured),
        documents=_documents(measured),
        notes=_notes(members),
    )


def _documents(measured: Sequence[Result]) -> Documents | None:
    rows = [row for row in measured if row.nll is not None]
    if not rows:
        return None

    def pooled(name: str) -> Estimate:
        value = float(np.mean([getattr(row, name) for row in rows]))
        # Several seeds read the same documents: their limits do not add up to one interval.
        lo, hi = (getattr(rows[0], name + limit) if len(rows) == 1 else None for limit in ("_lo", "_hi"))
        return Estimate(value, lo, hi)

    feeding = ", ".join(sorted({row.feeding or "" for row in rows}))
    return Documents(pooled("nll").value, pooled("nll_excess"), pooled("kl"), pooled("score").value, feeding)


def _label(row: Result, rows: Sequence[Result]) -> str:
    label = _named(row)
    if row.adapted_lm is None or row.adapted_lm == row.checkpoint:
        return label
    owners = {_named(other) for other in rows if other.checkpoint == row.adapted_lm}
    return f"{label} @{min(owners) if owners else row.adapted_lm[:8]}"


def _named(row: Result) -> str:
    label = f"{row.policy}({row.policy_args})" if row.policy_args else row.policy
    return f"{label}[{row.variant}]" if row.variant else label


def _task(task: str, measured: Sequence[Result], rows: Sequence[Result], grades: Grades) -> Estimate | None:
    mine = [row for row in measured if row.task == task]
    if mine and mine[0].role == "dense":
        return _score(mine, grades)
    return _pooled(mine, rows, grades, adapted=False)


def _pooled(members: Sequence[Result], rows: Sequence[Result], grades: Grades, *, adapted: bool) -> Estimate | None:
    """Relative score over the problems of all rows that have a twin; None when one has none."""
    mine: dict[str, float] = {}
    dense: dict[str, float] = {}
    for row in members:
        twins = find_twins(row, rows)
        twin = twins.adapted if adapted else twins.base
        if twin is None:
            return None
        # A problem is its own cluster within a task and seed; the same name elsewhere is another one.
        mine |= {f"{row.twin_key}/{name}": mean for name, mean in problem_means(grades[row.key]).items()}
        dense |= {f"{row.twin_key}/{name}": mean for name, mean in problem_means(grades[twin.key]).items()}
    if members and members[0].role == "dense":
        return Estimate(1.0, 1.0, 1.0) if any(mine.values()) else None
    return relative_score(mine, dense, members[0].samples) if members else None


def _score(members: Sequence[Result], grades: Grades) -> Estimate | None:
    means = [mean for row in members for mean in problem_means(grades[row.key]).values()]
    return score_interval(means, members[0].samples) if means else None


def _mean(members: Sequence[Result], value: Callable[[Result], float | None]) -> float | None:
    values = [found for row in members if (found := value(row)) is not None]
    return float(np.mean(values)) if values else None


def _speed(members: Sequence[Result]) -> float | None:
    """All tokens over all seconds."""
    tokens = seconds = 0.0
    for row in members:
        if row.tokens_per_s and row.output_length:
            tokens += row.output_length * row.n * row.samples
            seconds += row.output_length * row.n * row.samples / row.tokens_per_s
    return tokens / seconds if seconds else None


def _notes(members: Sequence[Result]) -> dict[str, list[str]]:
    notes: dict[str, list[str]] = {}
    for row in members:
        if row.status != "ok":
            notes.setdefault(f"{row.status}: {row.reason}", []).append(row.task)
        for alarm in row.alarms:
            notes.setdefault(alarm, []).append(row.task)
    return notes
