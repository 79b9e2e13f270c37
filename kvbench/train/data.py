"""Rows to train on: reference solutions of the registered tasks, one problem a row, padded on the right.

Everything about step i follows from (seed, i): a run that goes on after a kill sees the same, and any number of
processes sees the same rows between them.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kvbench.core.budget import Budget, parse_cr
from kvbench.core.errors import KvbenchError
from kvbench.core.task import TracedTask
from kvbench.plugins import load_registry
from kvbench.train.documents import aligned
from kvbench.train.recipe import Recipe

# Seeds of problems: bits 32 and up are the run's, bit 31 marks held-back problems, the rest is the step.
_RUN = 1 << 32
_HELD_BACK = 1 << 31

_DOCUMENTS = 1 << 20
"""Documents of a row, at most: what names a document is its row and its place there."""


@dataclass(frozen=True)
class Batch:
    """The rows of one step, or of one process's part of it.

    Attributes:
        ids: token ids [R, S].
        lengths: true length of each row [R], int64.
        level: generation length of its problems, or length of its packed rows.
        budget: of the step.
        places: of the rows in the whole step [R], int64.
        borders: (row, start, stop) of each document where attention is reset at their borders [U, 3]; else None.
    """

    ids: Tensor
    lengths: Tensor
    level: int
    budget: Budget
    places: Tensor
    borders: Tensor | None = None

    def sequences(self) -> Tensor:
        """True lengths of what attention takes for a sequence: documents where it is reset, else rows [U]."""
        return self.lengths if self.borders is None else self.borders[:, 2] - self.borders[:, 1]

    def names(self) -> Tensor:
        """A number for each of them that is its own in the whole step [U], int64."""
        if self.borders is None:
            return self.places * _DOCUMENTS
        return self.places[self.borders[:, 0]] * _DOCUMENTS + self.borders[:, 1]

    def real(self) -> Tensor:
        """Positions whose next token belongs to the same sequence [R, S], bool."""
        token = torch.arange(self.ids.shape[1])
        real = token < self.lengths[:, None] - 1
        if self.borders is not None:
            real[self.borders[:, 0], self.borders[:, 2] - 1] = False
        return real

    def part(self, index: int, count: int) -> tuple[Batch, Tensor]:
        """Every `count`-th row from `index` on, and which of `sequences` they are.

        A part without a row is one token long and trains nothing, so that all processes take the same steps.
        """
        mine = torch.arange(len(self.ids)) % count == index
        if not bool(mine.any()):
            borders = None if self.borders is None else torch.tensor([[0, 0, 1]])
            one = replace(self, ids=self.ids[:1, : aligned(1)], lengths=torch.ones(1, dtype=torch.int64))
            return replace(one, places=self.places[:1], borders=borders), torch.tensor([0])
        size = aligned(int(self.lengths[mine].max()))
        part = replace(self, ids=self.ids[mine, :size], lengths=self.lengths[mine], places=self.places[mine])
        if self.borders is None:
            return part, mine.nonzero()[:, 0]
        chosen = mine[self.borders[:, 0]]
        borders = self.borders[chosen]
        borders[:, 0] = (mine.cumsum(0) - 1)[borders[:, 0]]
        return replace(part, borders=borders), chosen.nonzero()[:, 0]


class RowSource(Dataset[Batch], ABC):
    """Step -> rows. Sent to worker processes, so it holds no registry and no device.

    Args:
        recipe: decides levels, budgets and rows.
        seed: of the run.
    """

    name: str
    """What the rows are made of, for the record."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        self.seed = seed
        self.crs = [parse_cr(cr) for cr in recipe.crs]

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, step: int) -> Batch:
        """The rows of a training step."""
        rng = random.Random(f"{self.seed}/{step}")
        levels = sorted(self.recipe.levels)
        level = rng.choices(levels, [self.recipe.levels[level] for level in levels])[0]
        rows = max(1, self.recipe.tokens // self.reference_length(level))
        return self._rows(level, rng.choice(self.crs), rows, step, rng)

    def held_back(self, level: int, cr: Fraction, rows: int) -> Batch:
        """Rows that no training step uses; the same for every step and ratio."""
        return self._rows(level, cr, rows, None, random.Random(f"{self.seed}/held back/{level}"))

    @abstractmethod
    def reference_length(self, level: int) -> int:
        """Tokens that the dense cache is taken to hold at a level."""

    @abstractmethod
    def described(self) -> list[str]:
        """What the rows are made of, for the record: names with versions or revisions."""

    @abstractmethod
    def _rows(self, level: int, cr: Fraction, rows: int, step: int | None, rng: random.Random) -> Batch:
        """Rows of a step; of no step: held back from all of them."""


class Problems(RowSource):
    """One problem a row, from the generators of tasks.

    Args:
        tasks: sources of problems; none of them held out.
        tokenizer: of the model.
        recipe: decides levels, budgets and rows.
        seed: of the run.
    """

    def __init__(self, tasks: Sequence[TracedTask], tokenizer: Any, recipe: Recipe, seed: int) -> None:
        super().__init__(recipe, seed)
        held_out = [task.name for task in tasks if task.held_out]
        if held_out:
            raise KvbenchError(f"Task '{held_out[0]}' is held out: no policy may be trained on it.")
        if not tasks:
            raise KvbenchError("There is no task to train on.")
        for level in recipe.levels:
            for task in tasks:
                if level not in task.levels:
                    known = ", ".join(map(str, task.levels))
                    raise KvbenchError(
                        f"Task '{task.name}' has no problems of generation length {level}; it has {known}."
                    )
        self.tasks = list(tasks)
        self.tokenizer = tokenizer

    def described(self) -> list[str]:
        """Tasks with their versions."""
        return [f"{task.name}@{task.version}" for task in self.tasks]

    def reference_length(self, level: int) -> int:
        """Longest prompt and whole generation."""
        return level + max(task.longest_prompt(level) for task in self.tasks)

    def _rows(self, level: int, cr: Fraction, rows: int, step: int | None, rng: random.Random) -> Batch:
        problem_seed = self.seed * _RUN + (_HELD_BACK if step is None else step)
        counts = [rows // len(self.tasks)] * len(self.tasks)
        for index in rng.sample(range(len(self.tasks)), rows % len(self.tasks)):
            counts[index] += 1
        texts = [
            " ".join(task.trace(problem).tokens)
            for task, count in zip(self.tasks, counts, strict=True)
            for problem in task.problems(level, count, problem_seed, "train")
        ]
        encoded = [torch.tensor(ids, dtype=torch.int64) for ids in self.tokenizer(texts)["input_ids"]]
        lengths = torch.tensor([len(ids) for ids in encoded])
        size = aligned(int(lengths.max()))
        # Which token pads does not matter: nothing real looks to the right.
        ids = torch.zeros(rows, size, dtype=torch.int64)
        for row, tokens in zip(ids, encoded, strict=True):
            row[: len(tokens)] = tokens
        budget = Budget.from_cr(cr, self.reference_length(level))
        return Batch(ids, lengths, level, budget, torch.arange(rows))


def training_tasks(names: Sequence[str] = ()) -> list[TracedTask]:
    """The registered tasks of these names; without names, all with reference solutions that are not held out.

    Raises:
        KvbenchError: a named task does not exist, is held out, or has no reference solutions.
    """
    registry = load_registry()
    chosen = [registry.task(name) for name in names] or list(registry.tasks.values())
    tasks = []
    for entry in chosen:
        if entry.held_out:
            if names:
                raise KvbenchError(f"Task '{entry.name}' is held out: no policy may be trained on it.")
            continue
        task_class = entry.load()
        if isinstance(task_class, type) and issubclass(task_class, TracedTask):
            tasks.append(task_class())
        elif names:
            raise KvbenchError(f"Task '{entry.name}' has no reference solutions to train on.")
    return tasks


def stream(steps: Dataset[Any], first: int, workers: int) -> Iterator[Any]:
    """The items from step `first` on, in order, made in `workers` other processes (0: in this one)."""
    loader: DataLoader[Any] = DataLoader(
        steps,
        batch_size=None,
        sampler=range(first, len(steps)),  # type: ignore[arg-type]  # a Dataset that has a length
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        collate_fn=_same,
        worker_init_fn=_quiet_worker,
    )
    yield from loader


def _same(batch: Any) -> Any:
    """Batches are made whole; without this the loader would rebuild them."""
    return batch


def _quiet_worker(_: int) -> None:
    """One thread a worker: together they would outnumber the cores."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
