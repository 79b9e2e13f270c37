"""Rows to train on: reference solutions of the registered tasks, one problem a row, padded on the right.

Everything about step i follows from (seed, i): a run that goes on after a kill sees the same.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kvbench.core.budget import Budget, parse_cr
from kvbench.core.errors import KvbenchError
from kvbench.core.task import TracedTask
from kvbench.plugins import load_registry
from kvbench.train.recipe import Recipe

# Seeds of problems: bits 32 and up are the run's, bit 31 marks held-back problems, the rest is the step.
_RUN = 1 << 32
_HELD_BACK = 1 << 31

# Sequence lengths are rounded up to this: attention kernels want aligned masks, the allocator few sizes.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Batch:
    """The rows of one step.

    Attributes:
        ids: token ids [R, S].
        lengths: true length of each row [R], int64.
        level: generation length of its problems.
        budget: of the step.
    """

    ids: Tensor
    lengths: Tensor
    level: int
    budget: Budget

    def real(self) -> Tensor:
        """Positions whose next token belongs to the row [R, S], bool."""
        return torch.arange(self.ids.shape[1]) < self.lengths[:, None] - 1


class Problems(Dataset[Batch]):
    """Step -> rows. Sent to worker processes, so it holds no registry and no device.

    Args:
        tasks: sources of problems; none of them held out.
        tokenizer: of the model.
        recipe: decides levels, budgets and rows.
        seed: of the run.
    """

    def __init__(self, tasks: Sequence[TracedTask], tokenizer: Any, recipe: Recipe, seed: int) -> None:
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
        self.recipe = recipe
        self.seed = seed
        self.crs = [parse_cr(cr) for cr in recipe.crs]

    def __len__(self) -> int:
        return self.recipe.steps

    def reference_length(self, level: int) -> int:
        """Tokens that the dense cache is taken to hold at a level: longest prompt and whole generation."""
        return level + max(task.longest_prompt(level) for task in self.tasks)

    def __getitem__(self, step: int) -> Batch:
        """The rows of a training step."""
        rng = random.Random(f"{self.seed}/{step}")
        levels = sorted(self.recipe.levels)
        level = rng.choices(levels, [self.recipe.levels[level] for level in levels])[0]
        rows = max(1, self.recipe.tokens // self.reference_length(level))
        return self._rows(level, rng.choice(self.crs), rows, self.seed * _RUN + step, rng)

    def held_back(self, level: int, cr: Fraction, rows: int) -> Batch:
        """Rows that no training step uses; the same for every step and ratio."""
        rng = random.Random(f"{self.seed}/held back/{level}")
        return self._rows(level, cr, rows, self.seed * _RUN + _HELD_BACK, rng)

    def _rows(self, level: int, cr: Fraction, rows: int, problem_seed: int, rng: random.Random) -> Batch:
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
        size = -(-int(lengths.max()) // _ALIGNMENT) * _ALIGNMENT
        # Which token pads does not matter: nothing real looks to the right.
        ids = torch.zeros(rows, size, dtype=torch.int64)
        for row, tokens in zip(ids, encoded, strict=True):
            row[: len(tokens)] = tokens
        return Batch(ids, lengths, level, Budget.from_cr(cr, self.reference_length(level)))


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


def stream(problems: Problems, first: int, workers: int) -> Iterator[Batch]:
    """The batches from step `first` on, in order, made in `workers` other processes (0: in this one)."""
    loader: DataLoader[Batch] = DataLoader(
        problems,
        batch_size=None,
        sampler=range(first, len(problems)),
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
