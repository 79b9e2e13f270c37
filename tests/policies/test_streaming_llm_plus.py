from __future__ import annotations

import pytest
import torch

from kvbench.core.errors import KvbenchError
from kvbench.core.naive import streamed_sets
from kvbench.core.policy import Geometry, StateRequest, Tokens
from kvbench.core.ranking import keep_mask, ranks, running_cutoff
from kvbench_policies.streaming_llm_plus import StreamingLlmPlus

GEOMETRY = Geometry(layers=1, query_heads=4, kv_heads=2, head_dim=8)


def request(budget: int) -> StateRequest:
    split = StreamingLlmPlus().checked_split(budget, GEOMETRY)
    return StateRequest(0, 3, GEOMETRY, split, torch.zeros(3).long(), torch.device("cpu"))


def test_priority_is_the_position() -> None:
    state = StreamingLlmPlus().state(request(12))
    positions = torch.arange(20).expand(3, 20)
    given = Tokens(torch.randn(3, 2, 20, 8), torch.randn(3, 2, 20, 8), positions)
    found = state.prefill(given)
    assert found.dtype == torch.float32
    assert torch.equal(found, positions[:, None].float().expand(3, 2, 20))
    one = Tokens(given.keys[:, :, 4:5], given.values[:, :, 4:5], torch.tensor([[4], [9], [0]]))
    assert state.step(one, one).tolist() == [[4.0, 4.0], [9.0, 9.0], [0.0, 0.0]]
    assert state.tensors() == ()


def test_kept_are_the_sinks_and_the_newest() -> None:
    budget, size = 12, 40
    split = StreamingLlmPlus().checked_split(budget, GEOMETRY)
    priority = torch.arange(size).float()
    rank = ranks(priority)
    mask = keep_mask(rank, running_cutoff(rank, split.sinks, split.window, split.long), split.sinks, split.window)
    for query, kept in enumerate(streamed_sets(priority.tolist(), split.sinks, split.window, split.long)):
        wanted = set(range(min(4, query + 1))) | set(range(max(0, query - (budget - 4) + 1), query + 1))
        assert kept == wanted
        assert set(mask[query].nonzero().flatten().tolist()) == wanted


def test_only_the_language_model_is_trained() -> None:
    assert StreamingLlmPlus.learned
    assert StreamingLlmPlus().scorer(GEOMETRY) is None


def test_budget_below_the_smallest_is_refused_with_the_number() -> None:
    with pytest.raises(KvbenchError, match="at least 6 slots; this one has 5"):
        StreamingLlmPlus().checked_split(5, GEOMETRY)


def test_policy_is_hashable_and_checks_its_parameters() -> None:
    assert len({StreamingLlmPlus(), StreamingLlmPlus(), StreamingLlmPlus(sinks=2)}) == 2
    with pytest.raises(KvbenchError, match="window=0"):
        StreamingLlmPlus(window=0)
