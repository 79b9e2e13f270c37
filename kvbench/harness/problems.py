"""The problems of a cell as the model reads them: generated and tokenised once, for planning and for running."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.core.errors import KvbenchError
from kvbench.core.task import Problem, Task
from kvbench.plugins import Registry

if TYPE_CHECKING:
    from kvbench.models.source import LoadedModel


@dataclass(frozen=True)
class ProblemSet:
    """Problems of one task, length and seed.

    Attributes:
        problems: as the task made them.
        prompts: their token ids.
        longest: tokens of the longest prompt that the level can have, or that is here: shards and limits share it.
    """

    problems: tuple[Problem, ...]
    prompts: tuple[tuple[int, ...], ...]
    longest: int

    @property
    def prompt_hash(self) -> str:
        """Of all prompts in order, as text."""
        return hashlib.sha256(json.dumps([problem.prompt for problem in self.problems]).encode()).hexdigest()


class ProblemSource:
    """Makes problem sets for one tokenizer and keeps them.

    Args:
        loaded: the model whose tokenizer reads the prompts.
        tasks: by name.
    """

    def __init__(self, loaded: LoadedModel, tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        self._tokenizer = loaded.tokenizer
        self._sets: dict[tuple[str, int, int, int], ProblemSet] = {}

    def get(self, task: str, gen_length: int, count: int, seed: int) -> ProblemSet:
        """The first `count` problems.

        Raises:
            KvbenchError: the task has no problems of that length.
        """
        place = (task, gen_length, count, seed)
        if place not in self._sets:
            self._sets[place] = self._make(*place)
        return self._sets[place]

    def text(self, tokens: tuple[int, ...], eos: frozenset[int]) -> str:
        """What a completion says; the token that ended it says nothing."""
        kept = tokens[:-1] if tokens and tokens[-1] in eos else tokens
        return str(self._tokenizer.decode(list(kept), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def tokenizer_hash(self) -> str:
        """Of the vocabulary."""
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    def _make(self, name: str, gen_length: int, count: int, seed: int) -> ProblemSet:
        task = self.tasks[name]
        problems = tuple(task.problems(gen_length, count, seed))
        prompts = tuple(tuple(self._tokenizer(problem.prompt)["input_ids"]) for problem in problems)
        longest = max(task.longest_prompt(gen_length), *(len(prompt) for prompt in prompts))
        return ProblemSet(problems, prompts, longest)


def load_tasks(names: tuple[str, ...], registry: Registry) -> dict[str, Task]:
    """Make the tasks of these names.

    Raises:
        KvbenchError: a name's target is not a task.
    """
    tasks: dict[str, Task] = {}
    for name in names:
        entry = registry.task(name)
        made = entry.load()
        if not (isinstance(made, type) and issubclass(made, Task)):
            raise KvbenchError(
                f"Task '{name}' points at {entry.target}, which is not a subclass of kvbench.core.task.Task."
            )
        tasks[name] = made()
    return tasks
