from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import StateRequest
from kvbench.core.slots import Slots
from kvbench_policies.h2o import H2o
from tests.engine.tiny import dense, feed, load, text


def _oracle(weights: list[list[float]], budget: int, window: int) -> list[set[int]]:
    """One head: a dictionary of sums; `weights[q][p]` is what query q gives to position p of those that it sees."""
    total: dict[int, float] = {}
    sets = []
    for place, row in enumerate(weights):
        if len(total) == budget:
            del total[min((p for p in total if p <= place - window), key=lambda p: (total[p], p))]
        total[place] = 0.0
        mass = sum(row[p] for p in total)
        for position in total:
            total[position] += row[position] / mass
        sets.append(set(total))
    return sets


def _machine(weights: Tensor, budget: int, policy: H2o) -> list[set[int]]:
    """The policy on slots of one row and one head: unnormalised weights [S, S] of each query."""
    geometry = load(heads=2, kv_heads=1).geometry
    split = policy.split(budget, geometry)
    slots = Slots.empty(1, 1, budget, 4, split.sinks, split.window, torch.float32, torch.device("cpu"))
    state = policy.state(StateRequest(0, 1, geometry, split, torch.zeros(1, dtype=torch.int64), torch.device("cpu")))
    sets = []
    for place, row in enumerate(weights):
        victim = place if place < budget else int(slots.priority[0, 0].argmin())
        slots.positions[0, 0, victim] = place
        slots.priority[0, 0, victim] = torch.inf
        held = slots.positions[0, 0]
        seen = row[held.clamp(min=0).long()] * (held >= 0)
        # Two query heads that differ but have this mean.
        both = torch.stack([0.5 * seen, 1.5 * seen]) / seen.sum()
        state.observe(both[None, :, None] / 2, slots)
        sets.append({p for p in held.tolist() if p >= 0})
    return sets


@pytest.mark.parametrize("recent", [0.0, 0.25, 0.5])
def test_the_least_attended_leaves(recent: float) -> None:
    policy, budget = H2o(recent=recent), 8
    weights = torch.rand(60, 60) ** 4 + 1e-3
    window = policy.split(budget, load().geometry).window
    assert window == max(1, int(recent * budget))
    assert _machine(weights, budget, policy) == _oracle(weights.tolist(), budget, window)


def test_chunks_count_every_query() -> None:
    """A prompt in one piece, then in chunks: the sums are those of the dense softmax while everything is kept."""
    loaded, ids = load("llama"), text(1, 24)
    trace = feed(loaded, H2o(), 24, ids, 24)
    total = trace.layers[0].state.tensors()[0]
    slow = feed(loaded, H2o(), 24, ids, 1).layers[0].state.tensors()[0]
    torch.testing.assert_close(total, slow, atol=1e-5, rtol=1e-5)
    # Each query gives each KV head the weight of its two query heads.
    torch.testing.assert_close(total.sum(-1), torch.full((1, 2), 48.0), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(trace.logits[:, 0], dense(loaded, ids)[:, -1], atol=1e-4, rtol=1e-4)


def test_the_smallest_budget_leaves_room_for_one_heavy_hitter() -> None:
    geometry = load().geometry
    for recent in (0.0, 0.5, 0.9):
        smallest = H2o(recent=recent).smallest_budget(geometry)
        assert H2o(recent=recent).split(smallest, geometry).long == 1
        with pytest.raises(KvbenchError, match="at least"):
            H2o(recent=recent).checked_split(smallest - 1, geometry)


def test_a_share_of_everything_is_refused() -> None:
    with pytest.raises(KvbenchError, match=r"recent=1\.0"):
        H2o(recent=1.0)
