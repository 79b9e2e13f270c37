"""The problems of a cell as the model reads them: generated and tokenised once, for planning and for running."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.core.errors import KvbenchError
from kvbench.core.task import DatasetTask, LongPromptTask, Problem, ScoringTask, Task
from kvbench.data.load import load
from kvbench.data.lock import Lock
from kvbench.harness.lm_eval_task import LmEvalTask
from kvbench.harness.options import LM_EVAL
from kvbench.plugins import Registry

if TYPE_CHECKING:
    from kvbench.models.source import LoadedModel

PLAIN: Literal["plain"] = "plain"
"""Stands for the chat template of a tokenizer that has none."""

_REASONING = "<think>"


@dataclass(frozen=True)
class ProblemSet:
    """Problems of one task, length and seed.

    Attributes:
        problems: as the task made them.
        texts: their prompts as the model sees them.
        prompts: the token ids of these.
        longest: tokens of the longest prompt that the level can have, or that is here: shards and limits share it.
        chat_template: hash of the chat template that made the texts, `plain` without one, None when none was asked for.
    """

    problems: tuple[Problem, ...]
    texts: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    longest: int
    chat_template: str | None = None

    @property
    def prompt_hash(self) -> str:
        """Of all prompts in order, as text."""
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()

    def opening(self, index: int) -> str:
        """The reasoning block that the chat template opens at the end of a prompt, and that its completion goes on with."""
        return _REASONING if self.chat_template and self.texts[index].rstrip().endswith(_REASONING) else ""


class ProblemSource:
    """Makes problem sets for one tokenizer and keeps them.

    Args:
        loaded: the model whose tokenizer reads the prompts.
        tasks: by name.
    """

    def __init__(self, loaded: LoadedModel, tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        self._tokenizer = loaded.tokenizer
        self._positions = loaded.max_positions
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

    def revision(self, name: str) -> str | None:
        """Of the data set of a task; None when its problems are generated."""
        task = self.tasks[name]
        if isinstance(task, LmEvalTask):
            return task.revision
        return task.rows.revision if isinstance(task, DatasetTask) else None

    @property
    def tokenizer_hash(self) -> str:
        """Of the vocabulary."""
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    def _make(self, name: str, gen_length: int, count: int, seed: int) -> ProblemSet:
        task = self.tasks[name]
        if isinstance(task, LongPromptTask):
            problems = tuple(task.fitted(gen_length, count, seed, lambda text: len(self._tokenizer(text)["input_ids"])))
        else:
            problems = tuple(task.problems(gen_length, count, seed))
        plain = tuple(problem.prompt for problem in problems)
        template = self._chat_template() if task.chat else None
        texts = tuple(map(self._rendered, plain)) if template not in (None, PLAIN) else plain
        # A chat template writes the special tokens itself.
        special = {} if texts is plain else {"add_special_tokens": False}
        prompts = tuple(tuple(self._tokenizer(text, **special)["input_ids"]) for text in texts)
        if isinstance(task, ScoringTask):
            prompts = tuple(_cut(task.name, *pair, gen_length) for pair in zip(problems, prompts, strict=True))
        longest = max(task.longest_prompt(gen_length), *(len(prompt) for prompt in prompts))
        if isinstance(task, LmEvalTask):
            # lm-eval's models cut what is too long, or read it in pieces.
            longest = min(longest, self._positions - task.new_tokens(gen_length))
        return ProblemSet(problems, texts, prompts, longest, template)

    def _chat_template(self) -> str:
        if self._tokenizer.chat_template is None:
            return PLAIN
        return hashlib.sha256(self._tokenizer.get_chat_template().encode()).hexdigest()

    def _rendered(self, prompt: str) -> str:
        message = [{"role": "user", "content": prompt}]
        return str(self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def _cut(task: str, document: Problem, tokens: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The first `length` tokens of a document.

    Raises:
        KvbenchError: it has not so many, or there would be nothing to score.
    """
    if len(tokens) < length:
        raise KvbenchError(
            f"Task '{task}' has no documents of {length} tokens: with this tokenizer {document.id} has {len(tokens)}; "
            "give a smaller --gen-len."
        )
    if length < 2:
        raise KvbenchError(f"Task '{task}' needs documents of at least 2 tokens; --gen-len is {length}.")
    return tokens[:length]


def load_tasks(
    names: Sequence[str], registry: Registry, lock: Lock, copies: Mapping[str, str] | None = None
) -> dict[str, Task]:
    """Make the tasks of these names; those of a data set with its records.

    Args:
        names: of the tasks.
        registry: where they are looked up.
        lock: holds the revisions of their data sets.
        copies: task -> local copy of its data set.

    Raises:
        KvbenchError: a name's target is not a task, the task cannot run here, or its data set cannot be read.
    """
    copies = copies or {}
    tasks: dict[str, Task] = {}
    for name in names:
        if name.startswith(LM_EVAL):
            tasks[name] = LmEvalTask(name, copies.get(name))
            continue
        entry = registry.task(name)
        made = entry.load()
        if not (isinstance(made, type) and issubclass(made, Task)):
            raise KvbenchError(
                f"Task '{name}' points at {entry.target}, which is not a subclass of kvbench.core.task.Task."
            )
        reason = made.unavailable()
        if reason is not None:
            raise KvbenchError(f"Task '{name}' cannot run here. {reason}")
        if issubclass(made, DatasetTask):
            tasks[name] = made(load(made.hub, copies.get(name), lock, f"--data {name}=PATH"))
        elif name in copies:
            raise KvbenchError(f"Task '{name}' has no data set, so it takes no --data.")
        else:
            tasks[name] = made()
    return tasks
