from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import islice

import pytest
import torch

from kvbench.core.errors import KvbenchError
from kvbench.plugins import load_registry
from kvbench.train.data import Batch, Problems, stream, training_tasks
from kvbench.train.recipe import Recipe
from kvbench_tasks.vocabulary import build_tokenizer


def _problems(recipe: Recipe, seed: int = 0) -> Problems:
    return Problems(training_tasks(recipe.tasks), build_tokenizer(), recipe, seed)


def _equal(one: Batch, other: Batch) -> bool:
    return (
        torch.equal(one.ids, other.ids)
        and torch.equal(one.lengths, other.lengths)
        and (one.level, one.budget) == (other.level, other.budget)
    )


@pytest.fixture
def mixed(short: Recipe) -> Recipe:
    return replace(short, levels={128: 1.0, 256: 1.0}, tokens=900, steps=12)


def test_a_step_follows_from_seed_and_step(mixed: Recipe) -> None:
    problems = _problems(mixed)
    assert all(_equal(problems[step], _problems(mixed)[step]) for step in range(12))
    assert not _equal(problems[0], _problems(mixed, seed=1)[0])
    assert {problems[step].level for step in range(12)} == {128, 256}
    assert len({problems[step].budget.slots for step in range(12)}) == 4


def test_the_stream_goes_on_anywhere_and_with_other_processes(mixed: Recipe) -> None:
    problems = _problems(mixed)
    wanted = [problems[step] for step in range(5, 9)]
    for workers in (0, 2):
        batches = list(islice(stream(problems, 5, workers), 4))
        assert all(_equal(mine, other) for mine, other in zip(wanted, batches, strict=True))


def test_rows_are_whole_solutions(mixed: Recipe) -> None:
    problems = _problems(mixed)
    tokenizer = build_tokenizer()
    for step in range(4):
        batch = problems[step]
        assert batch.ids.shape[0] == max(1, mixed.tokens // problems.reference_length(batch.level))
        assert batch.ids.shape[1] % 64 == 0
        for ids, length in zip(batch.ids, batch.lengths, strict=True):
            words = str(tokenizer.decode(ids[:length])).split()
            assert words[0] == "<bos>"
            assert words[-1] == "<eos>"
            assert not ids[length:].any()
            # What is trained on is a correct solution of its own prompt.
            task = next(task for task in problems.tasks if task.name == words[1])
            assert length <= problems.reference_length(batch.level)
            assert "answer" in words
            assert task.held_out is False
        assert batch.real().sum() == batch.lengths.sum() - len(batch.lengths)


def test_budgets_are_of_prompt_and_level(mixed: Recipe) -> None:
    problems = _problems(mixed)
    for level in (128, 256):
        longest = level + max(task.longest_prompt(level) for task in problems.tasks)
        batch = problems.held_back(level, Fraction(1, 2), 3)
        assert batch.budget.reference_length == longest
        assert batch.budget.slots in (longest // 2, longest // 2 + 1)


def test_held_back_rows_are_the_same_each_time_and_not_trained_on() -> None:
    recipe = Recipe(steps=40, tokens=3000, levels={512: 1.0})
    problems = _problems(recipe)
    held_back = problems.held_back(512, Fraction(3, 4), 5)
    assert torch.equal(held_back.ids, problems.held_back(512, Fraction(7, 8), 5).ids)
    seen = {tuple(row.tolist()) for step in range(40) for row in problems[step].ids}
    assert not seen & {tuple(row.tolist()) for row in held_back.ids}


def test_held_out_tasks_are_never_trained_on() -> None:
    held_out = [entry for entry in load_registry().tasks.values() if entry.held_out]
    assert held_out
    names = {task.name for task in training_tasks()}
    assert names
    assert not names & {entry.name for entry in held_out}
    with pytest.raises(KvbenchError, match="is held out: no policy may be trained on it"):
        training_tasks([held_out[0].name])
    task_class = held_out[0].load()
    assert isinstance(task_class, type)
    with pytest.raises(KvbenchError, match="is held out: no policy may be trained on it"):
        Problems([task_class()], build_tokenizer(), Recipe(), 0)


def test_parts_are_the_rows_of_a_step(mixed: Recipe) -> None:
    batch = _problems(mixed)[1]
    for count in (1, 2, 3):
        parts = [batch.part(index, count) for index in range(count)]
        for index, (part, chosen) in enumerate(parts):
            assert chosen.tolist() == list(range(index, len(batch.ids), count)) or not len(
                range(index, len(batch.ids), count)
            )
            for row, place in enumerate(part.places.tolist()):
                length = int(part.lengths[row])
                assert torch.equal(part.ids[row, :length], batch.ids[place, :length])
        # Every position that counts is in exactly one part.
        assert sum(int(part.real().sum()) for part, _ in parts) == int(batch.real().sum())


def test_a_part_without_rows_trains_nothing(mixed: Recipe) -> None:
    part, _ = _problems(mixed)[0].part(999, 1000)
    assert part.ids.shape[0] == 1
    assert not part.real().any()


def test_a_level_that_no_task_has(short: Recipe) -> None:
    with pytest.raises(KvbenchError, match=r"Task 'codebook' has no problems of generation length 300; it has 128, "):
        _problems(replace(short, levels={300: 1.0}))
