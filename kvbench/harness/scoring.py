"""Scored documents to a row: likelihood, distance to the dense model, and both by position in the side file.

A document is one problem. Its `score` is the share of tokens at which policy and dense model have the same favourite; what
belongs to a stretch of 256 tokens is JSON text in place of a completion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvbench.core.cell import Cell, digest
from kvbench.core.intervals import mean_interval
from kvbench.core.result import GradeRecord, Result
from kvbench.engine.divergence import Comparison, DenseReader
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Progress
from kvbench.engine.score import Passage, Scoring
from kvbench.harness.measured import counted, fields
from kvbench.harness.problems import ProblemSet
from kvbench.harness.store import CompletionRecord

BUCKET = 256
"""Tokens of a document that are reported together."""


class Means(NamedTuple):
    """Over tokens, in nats: of the policy, of the dense model, KL(dense || policy); and the share of equal favourites."""

    nll: float
    dense_nll: float
    kl: float
    top1: float


class Scored(NamedTuple):
    """What one `score` call says about each document: the means over all its tokens, and by bucket."""

    scoring: Scoring
    documents: tuple[Means, ...]
    buckets: tuple[tuple[Means, ...], ...]


def passages_of(cell: Cell, problems: ProblemSet) -> list[Passage]:
    """One passage a document and sample; every token but the first is scored."""
    return [
        Passage(tokens, 1, cell.stream(problem.id, sample))
        for problem, tokens in zip(problems.problems, problems.prompts, strict=True)
        for sample in range(cell.samples)
    ]


def score_passages(
    engine: Engine, dense: DenseReader, passages: Sequence[Passage], cell: Cell, progress: Progress | None
) -> Scored:
    """Score passages that `dense` has read."""
    comparison = Comparison(dense, passages)
    scoring = engine.score(passages, None, cell.reference_length, progress, comparison)
    documents, buckets = [], []
    for index, score in enumerate(scoring.scores):
        found = comparison.divergence(index)
        columns = np.array([score.logprobs, found.dense_logprobs, found.kl, found.agree]) * [[-1], [-1], [1], [1]]
        documents.append(Means(*map(float, columns.mean(1))))
        # The first token is not scored, so that the first bucket has one less.
        pieces = np.split(columns, range(BUCKET - 1, columns.shape[1], BUCKET), axis=1)
        buckets.append(tuple(Means(*map(float, piece.mean(1))) for piece in pieces if piece.shape[1]))
    return Scored(scoring, tuple(documents), tuple(buckets))


def records(cell: Cell, problems: ProblemSet, scored: Scored) -> tuple[CompletionRecord, ...]:
    """The side file's lines: one a document and sample."""
    lines = []
    for index, (document, buckets) in enumerate(zip(scored.documents, scored.buckets, strict=True)):
        number, sample = divmod(index, cell.samples)
        columns = {
            name: [round(value, 5) for value in values]
            for name, values in zip(Means._fields, zip(*buckets, strict=True), strict=True)
        }
        text = json.dumps({"bucket": BUCKET, **columns})
        grade = GradeRecord(
            key=cell.key,
            problem=problems.problems[number].id,
            sample=sample,
            correct=document.top1,
            steps_correct=None,
            tokens=len(problems.prompts[number]),
            finished=True,
            near_ties=0,
            digest=digest(text),
        )
        lines.append(CompletionRecord.of(cell, grade, text))
    return tuple(lines)


def summarise_scores(blank: Result, scored: Scored) -> Result:
    """Fill in everything that follows from the scores; intervals are over documents."""
    samples = blank.samples
    documents = np.array(scored.documents).reshape(-1, samples, len(Means._fields)).mean(1)
    nll, dense_nll, kl, top1 = (column.tolist() for column in documents.T)
    excess = [mine - theirs for mine, theirs in zip(nll, dense_nll, strict=True)]
    return replace(
        blank,
        n=len(documents),
        **fields("score", mean_interval(top1)),
        **fields("nll", mean_interval(nll, most=math.inf)),
        **fields("nll_excess", mean_interval(excess, math.inf, -math.inf)),
        **fields("kl", mean_interval(kl, most=math.inf)),
        **counted(scored.scoring.audit, scored.scoring.timing),
        feeding=scored.scoring.feeding,
        prefill="exact" if scored.scoring.feeding in ("exact", "token") else "chunked",
        path="plain",
        peak_memory=scored.scoring.peak_memory,
    )
