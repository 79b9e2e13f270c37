"""From a recipe to rows: tasks' generators, or a data set."""

from __future__ import annotations

from typing import Any

from kvbench.data.lock import Lock
from kvbench.train.data import Problems, RowSource, training_tasks
from kvbench.train.packed import DataSettings, PackedRows
from kvbench.train.recipe import Recipe


def row_source(recipe: Recipe, tokenizer: Any, lock: Lock, seed: int) -> RowSource:
    """What a recipe trains on.

    Args:
        recipe: settings.
        tokenizer: of the model.
        lock: which revision of a data set was read before; notes the one that is read now.
        seed: of the run.

    Raises:
        KvbenchError: a task or a data set is not there, or not fit to train on.
    """
    if not recipe.data:
        return Problems(training_tasks(recipe.tasks), tokenizer, recipe, seed)
    settings = DataSettings.of(recipe.data)
    return PackedRows(settings.read(lock), settings, tokenizer, recipe, seed)
