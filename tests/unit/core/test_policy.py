from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import pytest
import torch

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Geometry, Policy, Split, State, StateRequest, Tokens
from kvbench.core.recency import RecencyState

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)


@dataclass(frozen=True)
class Charging(Policy):
    name: ClassVar[str] = "charging"
    sinks: int = 3

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget - 2, sinks=self.sinks, window=5, charged=2)

    def state(self, request: StateRequest) -> State:
        return State()


def test_the_smallest_budget_leaves_one_long_slot() -> None:
    policy = Charging()
    smallest = policy.smallest_budget(GEOMETRY)
    assert smallest == 2 + 3 + 5 + 1
    assert policy.checked_split(smallest, GEOMETRY).long == 1
    with pytest.raises(KvbenchError, match="at least 11 slots; this one has 10"):
        policy.checked_split(10, GEOMETRY)


def test_policies_are_frozen_and_hashable() -> None:
    assert hash(Charging()) == hash(Charging()) != hash(Charging(sinks=4))
    with pytest.raises(FrozenInstanceError):
        Charging().sinks = 9  # type: ignore[misc]


def test_recency_is_exact_at_long_positions() -> None:
    positions = torch.tensor([[0, 1, 2**24 - 2, 2**24 - 1]])
    keys = torch.zeros(1, 2, 4, 8)
    priority = RecencyState().priority(Tokens(keys, keys, positions))
    assert priority.shape == (1, 2, 4)
    assert (priority.diff(dim=-1) > 0).all()


def test_group() -> None:
    assert GEOMETRY.group == 2
