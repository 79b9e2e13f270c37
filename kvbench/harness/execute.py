"""One cell to one row: generate, decode, grade, summarise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvbench.core.cell import Cell, digest
from kvbench.core.errors import KvbenchError
from kvbench.core.intervals import mean_interval, pass_at_k, score_interval
from kvbench.core.result import GradeRecord, Result
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Generation, Request, Sampling
from kvbench.harness.environment import commit, environment
from kvbench.harness.plan import Planned
from kvbench.harness.problems import ProblemSet, ProblemSource
from kvbench.harness.store import CompletionRecord

if TYPE_CHECKING:
    from kvbench.models.source import LoadedModel

Progress = Callable[[int], None]
"""Told the number of new tokens now and then."""


@dataclass(frozen=True)
class Outcome:
    """A finished cell: its row, and its completions with their grades."""

    result: Result
    completions: tuple[CompletionRecord, ...] = ()


class Executor(Protocol):
    """Runs cells; a failure is a row, never an exception."""

    def execute(self, planned: Planned, progress: Progress | None = None) -> Outcome:
        """Measure one cell."""


class LocalExecutor:
    """Runs cells in this process on one loaded model, whose weights are as before after each cell.

    Args:
        loaded: the model.
        problems: where prompts come from.
        processes: how many executors like this one share the machine.
    """

    def __init__(self, loaded: LoadedModel, problems: ProblemSource, processes: int = 1) -> None:
        self._loaded = loaded
        self._processes = processes
        self._problems = problems

    def execute(self, planned: Planned, progress: Progress | None = None) -> Outcome:
        """Measure one cell; whatever goes wrong in it becomes a failed row."""
        blank = self._described(Result.of(planned.cell, "ok", held_out=planned.held_out))
        try:
            return self._measure(planned, blank, progress)
        except Exception as error:  # noqa: BLE001 - one broken cell must not take the others with it
            told = str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}"
            reason = " ".join(told.split())[:500]
            return Outcome(replace(blank, status="failed", reason=reason))

    def _measure(self, planned: Planned, blank: Result, progress: Progress | None) -> Outcome:
        cell, choice, loaded = planned.cell, planned.choice, self._loaded
        problems = self._problems.get(cell.task, cell.gen_length, cell.problems, cell.seed)
        scorers = choice.checkpoint.scorers(loaded.geometry) if choice.checkpoint is not None else None
        if scorers is not None:
            scorers.to(loaded.device)
        with choice.adapted.adapted(loaded.model) if choice.adapted is not None else nullcontext():
            engine = Engine(loaded, choice.policy, cell.slots, scorers, cell.rows)
            generation = engine.generate(
                _requests(cell, problems),
                Sampling(cell.temperature, cell.top_p, cell.top_k),
                cell.reference_length,
                progress,
            )
        completions = self._graded(cell, problems, generation)
        result = summarise(blank, [record.grade for record in completions], generation)
        lengths = [len(prompt) for prompt in problems.prompts]
        result = replace(result, prompt_hash=problems.prompt_hash, prompt_length=float(np.mean(lengths)))
        if not choice.policy.hard_budget:
            audit = generation.audit
            result = replace(
                result, entries_mean=audit.entries_mean, entries_peak=audit.peak, head_entries=audit.head_entries
            )
        if generation.audit.violations and choice.policy.hard_budget:
            reason = (
                f"Policy '{cell.policy}' went over its budget of {cell.slots} slots "
                f"in {generation.audit.violations} layer, head and step combinations (peak {generation.audit.peak})."
            )
            # What was measured beyond the budget is not a measurement at the budget.
            return Outcome(replace(blank, status="failed", reason=reason, violations=generation.audit.violations))
        return Outcome(result, completions)

    def _graded(self, cell: Cell, problems: ProblemSet, generation: Generation) -> tuple[CompletionRecord, ...]:
        task = self._problems.tasks[cell.task]
        records = []
        for index, completion in enumerate(generation.completions):
            number, sample = divmod(index, cell.samples)
            problem = problems.problems[number]
            text = problems.opening(number) + self._problems.text(completion.tokens, self._loaded.eos)
            grade = task.grade(problem, text)
            record = GradeRecord(
                key=cell.key,
                problem=problem.id,
                sample=sample,
                correct=grade.exact,
                steps_correct=grade.steps_correct,
                tokens=len(completion.tokens),
                finished=completion.finish == "eos",
                near_ties=completion.near_ties,
                digest=digest(text),
                extracted=grade.extracted,
            )
            records.append(
                CompletionRecord(
                    grade=record,
                    task=cell.task,
                    task_version=cell.task_version,
                    gen_length=cell.gen_length,
                    text=text,
                )
            )
        return tuple(records)

    def _described(self, blank: Result) -> Result:
        return replace(
            blank,
            commit=commit().sha,
            environment=environment(self._loaded.device.type, self._processes),
            random_weights=self._loaded.random,
            tokenizer_hash=self._problems.tokenizer_hash,
        )


def summarise(blank: Result, grades: Sequence[GradeRecord], generation: Generation) -> Result:
    """Fill in everything that follows from the grades and from what the engine counted."""
    by_problem: dict[str, list[GradeRecord]] = {}
    for grade in grades:
        by_problem.setdefault(grade.problem, []).append(grade)
    score = score_interval([float(np.mean([g.correct for g in group])) for group in by_problem.values()], blank.samples)
    shares = [
        float(np.mean([g.steps_correct for g in group if g.steps_correct is not None]))
        for group in by_problem.values()
        if any(g.steps_correct is not None for g in group)
    ]
    steps = mean_interval(shares) if shares else None
    finished = [grade.correct for grade in grades if grade.finished]
    right = [sum(g.correct == 1 for g in group) for group in by_problem.values()]
    audit, timing = generation.audit, generation.timing
    return replace(
        blank,
        n=len(by_problem),
        score=score.value,
        score_lo=score.lo,
        score_hi=score.hi,
        pass_at_k=pass_at_k(right, blank.samples, blank.samples) if blank.samples > 1 else None,
        steps_correct=steps.value if steps is not None else None,
        steps_correct_lo=steps.lo if steps is not None else None,
        steps_correct_hi=steps.hi if steps is not None else None,
        score_finished=float(np.mean(finished)) if finished else None,
        truncated=float(np.mean([not grade.finished for grade in grades])),
        output_length=float(np.mean([grade.tokens for grade in grades])),
        near_ties=sum(grade.near_ties for grade in grades),
        cr_mean=audit.cr_mean,
        cr_peak=audit.cr_peak,
        cr_end=audit.cr_end,
        slots=audit.slots,
        evictions=audit.evictions,
        violations=audit.violations,
        kv_bytes=audit.kv_bytes,
        scorer_bytes=audit.scorer_bytes,
        metadata_bytes=audit.metadata_bytes,
        sliding_bytes=audit.sliding_bytes,
        prefill=generation.prefill,
        path=generation.path,
        ms_per_step=timing.ms_per_step,
        tokens_per_s=timing.tokens_per_s,
        peak_memory=generation.peak_memory,
    )


def _requests(cell: Cell, problems: ProblemSet) -> list[Request]:
    return [
        Request(prompt, cell.gen_length, cell.stream(problem.id, sample))
        for problem, prompt in zip(problems.problems, problems.prompts, strict=True)
        for sample in range(cell.samples)
    ]
