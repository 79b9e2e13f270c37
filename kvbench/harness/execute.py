"""One cell to one row: generate, decode, grade, summarise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvbench.core.cell import Cell, digest
from kvbench.core.errors import KvbenchError
from kvbench.core.intervals import mean_interval, score_interval
from kvbench.core.result import GradeRecord, Result
from kvbench.core.samples import ends, groups, majority, pass_at
from kvbench.core.task import Grade, Problem, ScoringTask, Task
from kvbench.engine.divergence import DenseReader
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Generation, Request, Sampling
from kvbench.harness.environment import commit, environment
from kvbench.harness.lm_eval_task import LmEvalTask
from kvbench.harness.measured import counted, fields
from kvbench.harness.plan import Planned
from kvbench.harness.problems import ProblemSet, ProblemSource
from kvbench.harness.scoring import passages_of, records, score_passages, summarise_scores
from kvbench.harness.store import CompletionRecord
from kvbench.harness.ungraded import Kept, Ungraded

if TYPE_CHECKING:
    from kvbench.models.source import LoadedModel

Progress = Callable[[int], None]
"""Told the number of new tokens now and then."""

Grading = Callable[[int, int], None]
"""Told how many completions of how many are graded."""


@dataclass(frozen=True)
class Outcome:
    """A finished cell: its row, and its completions with their grades."""

    result: Result
    completions: tuple[CompletionRecord, ...] = ()


class Executor(Protocol):
    """Runs cells; a failure is a row, never an exception."""

    def execute(self, planned: Planned, progress: Progress | None = None, grading: Grading | None = None) -> Outcome:
        """Measure one cell."""


class LocalExecutor:
    """Runs cells in this process on one loaded model, whose weights are as before after each cell.

    Args:
        loaded: the model.
        problems: where prompts come from.
        ungraded: where generations go whose grader fails.
        processes: how many executors like this one share the machine.
    """

    def __init__(self, loaded: LoadedModel, problems: ProblemSource, ungraded: Ungraded, processes: int = 1) -> None:
        self._loaded = loaded
        self._ungraded = ungraded
        self._processes = processes
        self._problems = problems
        self._dense: DenseReader | None = None

    def execute(self, planned: Planned, progress: Progress | None = None, grading: Grading | None = None) -> Outcome:
        """Measure one cell; whatever goes wrong in it becomes a failed row."""
        blank = self._described(planned.row())
        try:
            return self._measure(planned, blank, progress, grading)
        except Exception as error:  # noqa: BLE001 - one broken cell must not take the others with it
            told = str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}"
            reason = " ".join(told.split())[:500]
            return Outcome(replace(blank, status="failed", reason=reason))

    def _measure(self, planned: Planned, blank: Result, progress: Progress | None, grading: Grading | None) -> Outcome:
        cell, choice = planned.cell, planned.choice
        problems = self._problems.get(cell.task, cell.gen_length, cell.problems, cell.seed)
        task = self._problems.tasks[cell.task]
        if isinstance(task, LmEvalTask):
            result, completions = task.measure(blank, cell, self._loaded, choice)
        elif isinstance(task, ScoringTask):
            result, completions = self._scored(planned, blank, problems, progress)
        else:
            result, completions = self._generated(planned, blank, problems, progress, grading)
        if result.violations and choice.policy.hard_budget:
            reason = (
                f"Policy '{cell.policy}' went over its budget of {cell.slots} slots "
                f"in {result.violations} layer, head and step combinations."
            )
            # What was measured beyond the budget is not a measurement at the budget.
            return Outcome(replace(blank, status="failed", reason=reason, violations=result.violations))
        return Outcome(replace(result, prompt_hash=problems.prompt_hash), completions)

    def _generated(
        self,
        planned: Planned,
        blank: Result,
        problems: ProblemSet,
        progress: Progress | None,
        grading: Grading | None,
    ) -> tuple[Result, tuple[CompletionRecord, ...]]:
        cell, task = planned.cell, self._problems.tasks[planned.cell.task]
        kept = self._ungraded.get(cell.key)
        if kept is not None:
            generation = kept.generation
            blank = replace(blank, commit=kept.commit, environment=kept.environment)
        else:
            requests = _requests(cell, problems, task)
            sampling = Sampling(cell.temperature, cell.top_p, cell.top_k)
            with engine_of(planned, self._loaded) as engine:
                generation = engine.generate(requests, sampling, cell.reference_length, progress)

        def keep() -> None:
            assert blank.environment is not None
            self._ungraded.put(cell.key, Kept(generation, blank.commit, blank.environment))

        if task.grades_apart:
            # Running programs takes long enough to be interrupted.
            keep()
        try:
            completions = self._graded(cell, problems, generation, grading)
        except KvbenchError as error:
            keep()
            raise KvbenchError(f"{error} The completions are kept: the same command grades them again.") from error
        lengths = [len(prompt) for prompt in problems.prompts]
        result = summarise(blank, [record.grade for record in completions], generation)
        return replace(result, prompt_length=float(np.mean(lengths))), completions

    def _scored(
        self, planned: Planned, blank: Result, problems: ProblemSet, progress: Progress | None
    ) -> tuple[Result, tuple[CompletionRecord, ...]]:
        cell = planned.cell
        passages = passages_of(cell, problems)
        # Dense predictions are kept for the next cell, and made before an adapted LM moves in.
        dense = self._dense = self._dense or DenseReader(self._loaded)
        dense.read(passages)
        with engine_of(planned, self._loaded) as engine:
            scored = score_passages(engine, dense, passages, cell, progress)
        return summarise_scores(blank, scored), records(cell, problems, scored)

    def _graded(
        self, cell: Cell, problems: ProblemSet, generation: Generation, grading: Grading | None
    ) -> tuple[CompletionRecord, ...]:
        written = []
        for index, completion in enumerate(generation.completions):
            number = index // cell.samples
            text = problems.opening(number) + self._problems.text(completion.tokens, self._loaded.eos)
            written.append((problems.problems[number], text))
        threads = max(1, len(os.sched_getaffinity(0)) // self._processes)
        grades = grade_all(self._problems.tasks[cell.task], written, threads, grading)
        records = []
        for index, completion in enumerate(generation.completions):
            sample = index % cell.samples
            (problem, text), grade = written[index], grades[index]
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
            records.append(CompletionRecord.of(cell, record, text))
        return tuple(records)

    def _described(self, blank: Result) -> Result:
        return replace(
            blank,
            commit=commit().sha,
            environment=environment(self._loaded.device.type, self._processes),
            random_weights=self._loaded.random,
            tokenizer_hash=self._problems.tokenizer_hash,
        )


@contextmanager
def engine_of(planned: Planned, loaded: LoadedModel) -> Iterator[Engine]:
    """The engine of a cell, with the cell's LM in the model for as long."""
    cell, choice = planned.cell, planned.choice
    scorers = choice.checkpoint.scorers(loaded.geometry) if choice.checkpoint is not None else None
    if scorers is not None:
        scorers.to(loaded.device)
    with choice.adapted.adapted(loaded.model) if choice.adapted is not None else nullcontext():
        yield Engine(loaded, choice.policy, cell.slots, scorers, cell.rows, cell.attention)


def grade_all(
    task: Task, written: Sequence[tuple[Problem, str]], threads: int = 1, grading: Grading | None = None
) -> list[Grade]:
    """Grade completions, in threads if the task's grader waits for processes of its own.

    Args:
        task: whose grader it is.
        written: problems and what was written for them.
        threads: most completions graded at a time.
        grading: told after each.

    Raises:
        KvbenchError: the grader failed; the sentence names the problem.
    """

    def graded(pair: tuple[Problem, str]) -> Grade:
        try:
            return task.grade(*pair)
        except Exception as error:
            told = str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}"
            raise KvbenchError(f"The grader of task '{task.name}' failed on problem {pair[0].id}. {told}") from error

    grades = []
    with ThreadPoolExecutor(threads if task.grades_apart else 1) as pool:
        for grade in pool.map(graded, written) if task.grades_apart else map(graded, written):
            grades.append(grade)
            if grading is not None:
                grading(len(grades), len(written))
    return grades


def summarise(blank: Result, grades: Sequence[GradeRecord], generation: Generation) -> Result:
    """Fill in everything that follows from the grades and from what the engine counted."""
    problems = groups(grades)
    score = score_interval([float(np.mean([g.correct for g in group])) for group in problems], blank.samples)
    shares = [[g.steps_correct for g in group if g.steps_correct is not None] for group in problems]
    steps = mean_interval([float(np.mean(known)) for known in shares if known]) if any(shares) else None
    several = blank.samples > 1
    ended = ends(problems)
    return replace(
        blank,
        n=len(problems),
        **fields("score", score),
        **fields("pass_at_k", pass_at(problems, blank.samples) if several else None),
        **fields("maj_at_n", majority(problems) if several else None),
        **fields("steps_correct", steps),
        **fields("score_finished", ended.finished),
        **fields("truncated", ended.truncated),
        **fields("output_length", ended.length),
        **counted(generation.audit, generation.timing),
        near_ties=sum(grade.near_ties for grade in grades),
        prefill=generation.prefill,
        path=generation.path,
        peak_memory=generation.peak_memory,
    )


def _requests(cell: Cell, problems: ProblemSet, task: Task) -> list[Request]:
    return [
        Request(prompt, task.new_tokens(cell.gen_length), cell.stream(problem.id, sample))
        for problem, prompt in zip(problems.problems, problems.prompts, strict=True)
        for sample in range(cell.samples)
    ]
