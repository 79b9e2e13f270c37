from __future__ import annotations

from kvbench.core.policy import Geometry
from kvbench_policies.full import Full

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)


def test_full_has_as_many_slots_as_tokens_and_never_evicts() -> None:
    policy = Full()
    assert not policy.evicts
    assert not policy.needs_attention
    assert policy.smallest_budget(GEOMETRY) == 1
    assert policy.checked_split(7, GEOMETRY).slots == 7
