from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.models.source import LoadedModel
from kvbench.train.data import Problems, training_tasks
from kvbench.train.portion import Draw, Portion
from kvbench.train.recipe import Recipe
from kvbench_policies.kvpop_mlp.policy import KvpopMlp

POLICY = KvpopMlp(sinks=2, window=8)
FUTURE = 16


def _portion(tiny: LoadedModel, recipe: Recipe, slots: int, stream: str) -> Portion:
    rows = Problems(training_tasks(recipe.tasks), tiny.tokenizer, recipe, 0)
    return Draw(POLICY, tiny.geometry, 500, FUTURE, slots).portions(rows[0], stream, 1, range(1))[0]


def test_pairs_are_taken_at_fewer_slots_than_the_budgets(tiny: LoadedModel, short: Recipe) -> None:
    recipe = replace(short, tokens=1000)
    seen = set()
    for index in range(60):
        portion = _portion(tiny, recipe, 4, f"0/{index}")
        split, pairs = portion.split, portion.pairs
        assert 4 <= pairs.long <= split.long
        seen.add(pairs.long)
        for sample, long in ((portion.sample, split.long), (pairs.sample, pairs.long)):
            assert int(sample.queries.min()) >= split.sinks + split.window + long
            assert bool((sample.queries <= portion.batch.lengths[:, None] - FUTURE).all())
            # 500 queries come close to the first that is allowed, so that early tokens are newcomers.
            assert int(sample.queries.min()) <= split.sinks + split.window + long + 4
    # Log-uniform: more of them at few slots.
    assert {4, split.long} <= seen or {4, split.long - 1} <= seen
    assert len(seen) > 10


@pytest.mark.parametrize("slots", [0, 10_000])
def test_without_a_smaller_number_pairs_are_those_of_the_budget(tiny: LoadedModel, short: Recipe, slots: int) -> None:
    portion = _portion(tiny, short, slots, "0/0")
    assert portion.pairs.long == portion.split.long
    assert torch.equal(portion.pairs.sample.queries, portion.sample.queries)
