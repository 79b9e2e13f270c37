"""Training batches for the reference model: a pure function of recipe and step, made by worker processes."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from kvbench.core.task import Problem, TracedTask
from kvbench.entries import load_target
from kvbench.plugins import load_registry
from kvbench.train.reference_recipe import ReferenceRecipe

IGNORED = -100
"""The label of a token that carries no loss."""


class Batch(NamedTuple):
    """Rows of one generation length, right-padded.

    Attributes:
        ids: uint8 [rows, width]; 0 is padding.
        prompt_lens: int64 [rows].
        level: the generation length.
    """

    ids: torch.Tensor
    prompt_lens: torch.Tensor
    level: int

    def labels(self) -> torch.Tensor:
        """Return int64 [rows, width - 1]: the next token where it belongs to a completion, else `IGNORED`."""
        following = self.ids[:, 1:].long()
        position = torch.arange(1, self.ids.shape[1], device=self.ids.device)
        learned = (position >= self.prompt_lens[:, None]) & (following != 0)
        return following.masked_fill(~learned, IGNORED)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on another device."""
        return Batch(self.ids.to(device, non_blocking=True), self.prompt_lens.to(device, non_blocking=True), self.level)


def load_tasks(recipe: ReferenceRecipe) -> list[TracedTask]:
    """Return the tasks of a recipe."""
    registry = load_registry()
    tasks: list[TracedTask] = []
    for name in recipe.tasks:
        task = registry.task(name).load()
        assert isinstance(task, type)
        assert issubclass(task, TracedTask)
        tasks.append(task())
    return tasks


class ReferenceBatches(Dataset[Batch]):
    """Item `step` is the batch of that step."""

    def __init__(self, recipe: ReferenceRecipe) -> None:
        self.recipe = recipe
        self.tasks = load_tasks(recipe)
        vocabulary = load_target(recipe.vocabulary)
        assert isinstance(vocabulary, tuple)
        self.word_ids = {word: i for i, word in enumerate(vocabulary)}
        self.widths = {level: level + max(t.longest_prompt(level) for t in self.tasks) for level in recipe.levels}

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, step: int) -> Batch:
        key = hashlib.sha256(f"{self.recipe.seed}/{step}".encode()).digest()
        rng = random.Random(key)
        levels, weights = zip(*self.recipe.stage(step).levels, strict=True)
        level: int = rng.choices(levels, weights)[0]
        rows = max(1, self.recipe.tokens_per_step // self.widths[level])
        seed = rng.getrandbits(62)
        shares = Counter(rng.randrange(len(self.tasks)) for _ in range(rows))
        problems = [
            (self.tasks[task], problem)
            for task, n in sorted(shares.items())
            for problem in self.tasks[task].problems(level, n, seed, "train")
        ]
        return self.pack(problems, level)

    def pack(self, problems: list[tuple[TracedTask, Problem]], level: int) -> Batch:
        """Return the traces of some problems of one level as a batch."""
        width = self.widths[level]
        word_ids = self.word_ids
        packed = bytearray()
        prompt_lens = []
        for task, problem in problems:
            trace = task.trace(problem)
            row = bytes([word_ids[word] for word in trace.tokens])
            packed += row.ljust(width, b"\0")
            prompt_lens.append(trace.prompt_len)
        ids = torch.frombuffer(packed, dtype=torch.uint8).view(len(problems), width)
        return Batch(ids, torch.tensor(prompt_lens), level)


class _Steps:
    """The sampler: steps in order, from the one at which training goes on."""

    def __init__(self, first: int, end: int) -> None:
        self.steps = range(first, end)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


def batch_loader(recipe: ReferenceRecipe, first_step: int, workers: int, pin: bool) -> DataLoader[Batch]:
    """Return the batches from `first_step` on, in order whatever the number of worker processes."""
    return DataLoader(
        ReferenceBatches(recipe),
        batch_size=None,
        sampler=_Steps(first_step, recipe.steps),
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        # A process that has used CUDA must not be forked.
        multiprocessing_context="spawn" if workers else None,
        pin_memory=pin,
    )
