from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.naive import fenwick_cutoff, streamed_sets
from kvbench.core.ranking import keep_mask, ranks, running_cutoff

PRIORITIES = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.0, math.inf, -math.inf, math.nan]), min_size=1, max_size=40
)
SIZES = st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(0, 45))


def _clean(priority: list[float]) -> list[float]:
    return [-math.inf if math.isnan(value) else value for value in priority]


def _sets(mask: torch.Tensor) -> list[set[int]]:
    return [set(row.nonzero().flatten().tolist()) for row in mask]


def _check(priority: list[float], sinks: int, window: int, k: int) -> None:
    rank = ranks(torch.tensor(priority))
    cutoff = running_cutoff(rank, sinks, window, k)
    assert cutoff.tolist() == fenwick_cutoff(rank.tolist(), sinks, window, k)
    assert _sets(keep_mask(rank, cutoff, sinks, window)) == streamed_sets(_clean(priority), sinks, window, k)


@given(PRIORITIES, SIZES)
@settings(max_examples=300, deadline=None)
def test_parallel_equals_token_by_token(priority: list[float], sizes: tuple[int, int, int]) -> None:
    _check(priority, *sizes)


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 127])
@pytest.mark.parametrize("levels", [1, 3, 10**6])
def test_parallel_equals_token_by_token_at_borders(size: int, levels: int) -> None:
    priority = torch.randint(levels, (size,)).float().tolist()
    for sinks, window in ((0, 1), (0, size), (4, 1), (4, size - 1 or 1), (2, size + 1), (size, 1), (size + 3, 2)):
        for k in (0, 1, 2, size // 2, size - 1, size, size + 7):
            _check(priority, sinks, window, max(k, 0))


@pytest.mark.parametrize("size", [700, 1025])
def test_parallel_equals_token_by_token_at_length(size: int) -> None:
    _check(torch.randint(40, (size,)).float().tolist(), sinks=4, window=16, k=61)


def test_every_head_has_its_own_cutoff() -> None:
    priority = torch.randint(5, (3, 2, 50)).float()
    rank = ranks(priority)
    cutoff = running_cutoff(rank, 2, 4, 6)
    mask = keep_mask(rank, cutoff, 2, 4)
    for row in range(3):
        for head in range(2):
            assert _sets(mask[row, head]) == streamed_sets(priority[row, head].tolist(), 2, 4, 6)


def test_a_block_of_queries_is_a_slice_of_all() -> None:
    rank = ranks(torch.randint(3, (2, 40)).float())
    cutoff = running_cutoff(rank, 1, 3, 5)
    assert torch.equal(keep_mask(rank, cutoff, 1, 3, slice(7, 19)), keep_mask(rank, cutoff, 1, 3)[..., 7:19, :])


@given(PRIORITIES)
def test_ranks_are_a_permutation_with_the_newer_first(priority: list[float]) -> None:
    clean = _clean(priority)
    expected = sorted(range(len(clean)), key=lambda t: (-clean[t], -t))
    assert ranks(torch.tensor(priority)).argsort().tolist() == expected


@given(PRIORITIES, SIZES)
@settings(deadline=None)
def test_cutoff_never_loosens_and_what_is_dropped_stays_dropped(
    priority: list[float], sizes: tuple[int, int, int]
) -> None:
    sinks, window, k = sizes
    rank = ranks(torch.tensor(priority))
    cutoff = running_cutoff(rank, sinks, window, k)
    assert (cutoff.diff() <= 0).all()
    mask = keep_mask(rank, cutoff, sinks, window)
    size = len(priority)
    born = torch.ones(size, size, dtype=torch.bool).tril()
    assert not ((~mask & born)[:-1] & mask[1:]).any()
    assert int(mask.sum(-1).max()) <= sinks + window + k
    # Nothing is dropped before it has to be.
    assert mask.sum(-1).tolist() == [min(q + 1, sinks + window + k) for q in range(size)]


@given(PRIORITIES, SIZES, st.integers(0, 39))
@settings(deadline=None)
def test_the_set_at_a_query_does_not_depend_on_later_tokens(
    priority: list[float], sizes: tuple[int, int, int], query: int
) -> None:
    sinks, window, k = sizes
    query = min(query, len(priority) - 1)

    def kept(values: list[float]) -> set[int]:
        rank = ranks(torch.tensor(values))
        return _sets(keep_mask(rank, running_cutoff(rank, sinks, window, k), sinks, window))[query]

    past = priority[: query + 1]
    assert kept(past) == kept(priority) == kept(past + [5.0] * 7)


def test_zero_long_slots_keep_sinks_and_window_only() -> None:
    rank = ranks(torch.rand(20))
    cutoff = running_cutoff(rank, 2, 3, 0)
    assert cutoff.tolist() == [-1] * 20
    assert _sets(keep_mask(rank, cutoff, 2, 3))[-1] == {0, 1, 17, 18, 19}
