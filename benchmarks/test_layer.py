"""A whole layer's decode step under each policy: state, victim, overwrite, attention, observation."""

from __future__ import annotations

import pytest

from benchmarks.case import Case, Piece, Timed, nbytes, policy_named, weights
from kvbench.core.policy import ObservedState
from kvbench.plugins import load_registry


@pytest.mark.parametrize("name", sorted(load_registry().policies))
def test_decode(name: str, case: Case, timed: Timed) -> None:
    policy = policy_named(name)
    bounded = policy.evicts and policy.hard_budget
    sample = case.layer(policy)
    slots, state = sample.slots, sample.state
    # Keys and values are read. So are priorities, if there is a victim; who observes writes them too.
    floor = nbytes(slots.keys, slots.values) + (bounded + isinstance(state, ObservedState)) * slots.priority.nbytes
    floor += weights(state) + 2 * nbytes(*state.tensors())
    # Without a victim each token has its own slot, here the last one again and again.
    step = case.step(slots.capacity if bounded else slots.capacity - 1)

    def piece() -> Piece:
        layer = case.layer(policy)
        query, key, value = case.new(case.geometry.query_heads), *case.new_pair()
        return lambda: layer.decode(query, key, value, 1.0, step)

    timed(case, piece, floor)
