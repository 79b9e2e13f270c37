"""What a task is: problems, grades, and the reference solution with what it still needs at each token. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Literal

from kvbench.core.dataset import Record, Rows, Source
from kvbench.core.errors import KvbenchError

Split = Literal["eval", "train"]
"""Problems of different splits never coincide: scores come from `eval`, every training from `train`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        id: unique within everything that kvbench can generate, e.g. `recurrence@1/1024/seed0/17`.
        prompt: the text that the model sees.
        answer: the canonical answer.
        meta: further facts about the problem, as (name, value) pairs so that a problem stays hashable.
    """

    id: str
    prompt: str
    answer: str
    meta: tuple[tuple[str, str | int], ...] = ()


@dataclass(frozen=True, slots=True)
class Grade:
    """How good one completion is.

    Attributes:
        exact: 1.0 if the answer is the canonical one, else 0.0.
        steps_correct: share of the problem's steps that are correct before the first error; None for tasks without steps.
        finished: the completion got as far as giving an answer.
        extracted: what the grader took for the answer, written so that equal answers are equal texts; None: there was
            none. Majority votes count it.
    """

    exact: float
    steps_correct: float | None
    finished: bool
    extracted: str | None = None


class Task(ABC):
    """A named, versioned source of problems plus a grader; constructed without arguments, except a `DatasetTask`.

    Attributes:
        name: registered name.
        version: raised whenever a problem, a prompt or a grade changes.
        held_out: no policy is trained on this task.
        levels: generation lengths, in tokens, for which there are problems; () for any.
        chat: a prompt is a user's message: it goes through the tokenizer's chat template, if that has one.
        grades_apart: grading waits for other processes, so that several completions are graded at a time, in threads.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    held_out: ClassVar[bool] = False
    levels: ClassVar[tuple[int, ...]] = ()
    chat: ClassVar[bool] = False
    grades_apart: ClassVar[bool] = False

    @classmethod
    def unavailable(cls) -> str | None:
        """Return why the task cannot run on this machine, as a sentence; None if it can."""
        return None

    @abstractmethod
    def problems(self, gen_len: int, n: int, seed: int, split: Split = "eval") -> list[Problem]:
        """Return the first `n` problems of a level; problem i does not depend on `n`.

        Raises:
            KvbenchError: the task has no such level.
        """

    def longest_prompt(self, gen_len: int) -> int:
        """Return how many tokens the longest prompt of a level has; 0: that of the problems that are there."""
        return 0

    def new_tokens(self, gen_len: int) -> int:
        """Return how many tokens an answer of a level may have."""
        return gen_len

    @abstractmethod
    def grade(self, problem: Problem, completion: str) -> Grade:
        """Grade a completion; malformed ones are wrong, never an error."""


class DatasetTask(Task):
    """A task whose problems are the records of a data set, in their order and whatever the seed.

    Args:
        rows: the records.

    Attributes:
        hub: where the data set lies, unless somebody has a copy.
    """

    hub: ClassVar[Source]

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @abstractmethod
    def parse(self, record: Record, index: int) -> Problem:
        """Turn a record into a problem.

        Raises:
            KvbenchError: the record lacks a column (`value` says so).
        """

    def problems(self, gen_len: int, n: int, seed: int, split: Split = "eval") -> list[Problem]:
        """Return the first `n` problems, or all when there are fewer.

        Raises:
            KvbenchError: training problems were asked for, or a record is not of the data set's schema.
        """
        if split == "train":
            raise KvbenchError(f"Task '{self.name}' is for evaluation only; train on another task.")
        return [self.parse(self.rows[index], index) for index in range(min(n, len(self.rows)))]

    def problem_id(self, index: int) -> str:
        """Return the identity of the problem that record `index` makes."""
        return f"{self.name}@{self.version}/{index}"

    def value(self, record: Record, index: int, *columns: str) -> Any:
        """Return what a record has in the first of these columns that it fills: copies of one data set differ in names.

        Raises:
            KvbenchError: it fills none; the sentence names file, row and column.
        """
        for column in columns:
            if record.get(column) is not None:
                return record[column]
        wanted = " or ".join(f"'{column}'" for column in columns)
        raise KvbenchError(
            f"Row {index + 1} of {self.rows.name} has no value in column {wanted}, which task '{self.name}' needs; "
            f"it has {', '.join(map(str, record)) or 'no columns'}."
        )


Count = Callable[[str], int]
"""How many tokens a text has for the model that is measured."""


class LongPromptTask(Task):
    """A task whose levels are lengths of the prompt, filled up for whatever tokenizer; answers are short.

    Attributes:
        answer_tokens: how many tokens an answer may have.
    """

    answer_tokens: ClassVar[int]

    @abstractmethod
    def fitted(self, length: int, n: int, seed: int, count: Count, split: Split = "eval") -> list[Problem]:
        """Return the first `n` problems whose prompts have at most `length` tokens, and hardly fewer.

        Raises:
            KvbenchError: not even a prompt without filling is that short.
        """

    def problems(self, gen_len: int, n: int, seed: int, split: Split = "eval") -> list[Problem]:
        """Return problems for a tokenizer of four characters a token."""
        return self.fitted(gen_len, n, seed, lambda text: -(-len(text) // 4), split)

    def longest_prompt(self, gen_len: int) -> int:
        return gen_len

    def new_tokens(self, gen_len: int) -> int:
        return self.answer_tokens


class ScoringTask(Task):
    """A task whose problems are documents in `prompt`: the model is told every token and asked how likely it found it.

    The generation length is the number of tokens of a document that are read.
    """

    def longest_prompt(self, gen_len: int) -> int:
        return gen_len

    def new_tokens(self, gen_len: int) -> int:
        return 0

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Refuse: nothing is written that could be graded."""
        raise KvbenchError(f"Task '{self.name}' scores documents; there are no completions to grade.")


class TracedTask(Task):
    """A task whose problems have a reference solution, written token by token."""

    @abstractmethod
    def trace(self, problem: Problem) -> Trace:
        """Return the reference solution of a problem."""


@dataclass(slots=True)
class Trace:
    """A reference solution and, for each of its tokens, which earlier tokens it was made from.

    Attributes:
        tokens: the words of prompt and completion.
        prompt_len: how many of them are the prompt.
        uses: pairs (use position, source position): the token at the use position, the one to be generated there, needs
            the token at the earlier source position.
        reaches: for each number or line that is looked up, how many tokens ago its nearest copy ended, whatever is a
            copy of it. A cache of the most recent tokens that is smaller than the largest of them must fail.
    """

    tokens: list[str]
    prompt_len: int
    uses: list[tuple[int, int]] = field(default_factory=list)
    reaches: list[int] = field(default_factory=list)

    @property
    def completion(self) -> str:
        """The part that a model has to generate, as text."""
        return " ".join(self.tokens[self.prompt_len :])


def last_uses(trace: Trace) -> list[int]:
    """Return the position of each token's last use; -1 for a token that is never used."""
    last = [-1] * len(trace.tokens)
    for use, source in trace.uses:
        last[source] = max(last[source], use)
    return last


def live_set_sizes(trace: Trace, min_age: int = 0, first: int = 0) -> list[int]:
    """Return for each position q the number of live tokens from `first` on that are at least `min_age` tokens old.

    The token at t is live at q if t <= q and some use of it lies after q; its age is q - t.
    """
    change = [0] * (len(trace.tokens) + 1)
    for position, last in enumerate(last_uses(trace)):
        if position >= first and last > position + min_age:
            change[position + min_age] += 1
            change[last] -= 1
    return list(accumulate(change[:-1]))


def ages(trace: Trace) -> Sequence[int]:
    """Return how far back each use reaches, in tokens."""
    return [use - source for use, source in trace.uses]
