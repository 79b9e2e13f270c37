"""A small grid of stored rows: two tasks, one held out; a policy that keeps part of what dense solves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvbench.core.cell import Cell
from kvbench.core.intervals import score_interval
from kvbench.core.result import GradeRecord, Result
from kvbench.report.load import Stored, by_key

Pair = tuple[Result, list[GradeRecord]]

CELL = Cell(
    model="tiny",
    weights_hash="w",
    policy="full",
    task="chain",
    task_version=1,
    gen_length=128,
    slots=None,
    cr=None,
    reference_length=150,
    problems=4,
    samples=1,
    seed=0,
    dtype="float32",
    device="cpu",
    rows=4,
)
KEPT: dict[str, Any] = {"slots": 19, "cr": "7/8"}


def measured(scores: Sequence[float], *, held_out: bool = False, text: str = "", **coordinates: object) -> Pair:
    """A row with these scores; its completions are unlike anybody else's unless `text` says what they are."""
    cell = replace(CELL, **coordinates)  # type: ignore[arg-type]  # any field of a cell
    grades = [
        GradeRecord(
            key=cell.key,
            problem=f"p{index}",
            sample=0,
            correct=score,
            steps_correct=score,
            tokens=128,
            finished=True,
            near_ties=0,
            digest=text or f"{cell.key}{index}",
        )
        for index, score in enumerate(scores)
    ]
    score = score_interval(list(scores))
    row = replace(
        Result.of(cell, "ok", held_out=held_out),
        score=score.value,
        score_lo=score.lo,
        score_hi=score.hi,
        evictions=0 if cell.slots is None else 100,
        tokens_per_s=100.0,
        output_length=128.0,
        prompt_length=22.0,
        cr_mean=0.0 if cell.slots is None else 0.7,
        cr_peak=0.1 if cell.slots is None else 0.8,
        ms_per_step=1.5,
        kv_bytes=2048,
        scorer_bytes=0,
    )
    return row, grades


def stored(*pairs: Pair) -> Stored:
    return Stored(tuple(row for row, _ in pairs), by_key(grade for _, grades in pairs for grade in grades))


@pytest.fixture
def make_row() -> Callable[..., Pair]:
    return measured


@pytest.fixture
def make_stored() -> Callable[..., Stored]:
    return stored


@pytest.fixture
def grid() -> Stored:
    learned: dict[str, Any] = {"checkpoint": "c1", "adapted_lm": "c1", **KEPT}
    rows = [
        *(measured([1, 1, 1, 0], task=task, held_out=held) for task, held in (("chain", False), ("ledger", True))),
        *(
            measured([1, 0, 0, 0], task=task, held_out=held, policy="tova", **KEPT)
            for task, held in (("chain", False), ("ledger", True))
        ),
        measured([1, 1, 0, 0], adapted_lm="c1"),
        measured([1, 0, 1, 0], policy="kvpop", **learned),
        (Result.of(replace(CELL, policy="streaming_llm", slots=3, cr="0.98"), "skipped", "Too small."), []),
        (Result.of(replace(CELL, policy="random", **KEPT), "failed", "It broke."), []),
    ]
    return stored(*rows)
