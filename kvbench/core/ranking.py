"""The running top-k: which tokens a static priority keeps at every step, in parallel.

`ranks` turns priorities into integers once, so that every later comparison is exact. `running_cutoff` gives, for each
query, the rank of the k-th best token that has left the window; `keep_mask` is the set that token-by-token eviction
retains. The slow truth is in `naive.py` beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


def ranks(priority: Tensor) -> Tensor:
    """Rank of each token [..., S], int64, 0 = kept longest. Equal priorities: the newer first. NaN counts as -inf."""
    newest_first = priority.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).flip(-1)
    order = newest_first.argsort(dim=-1, descending=True, stable=True)
    tokens = priority.shape[-1] - 1 - order
    places = torch.arange(priority.shape[-1], device=priority.device).expand_as(tokens)
    return torch.empty_like(tokens).scatter_(-1, tokens, places)


def running_cutoff(rank: Tensor, sinks: int, window: int, k: int) -> Tensor:
    """Rank of the k-th best eligible token at each query [..., S]; S where fewer than k are eligible, -1 if k is 0.

    Token t is eligible at query q when sinks <= t <= q - window. Vectorised over everything but the bits of a rank:
    a wavelet tree's k-th smallest of a prefix, O(S log S) time and O(S) memory a head (docs/kvpop.md 2.3).
    """
    size = rank.shape[-1]
    queries = torch.arange(size, device=rank.device)
    if k == 0:
        return torch.full_like(rank, -1)
    current = rank[..., sinks : max(size - window, sinks)]
    length = current.shape[-1]
    eligible = (queries - window - sinks + 1).clamp(0, length)
    low = torch.zeros_like(rank)
    high = eligible.expand_as(rank).clone()
    wanted = torch.full_like(rank, k)
    cutoff = torch.zeros_like(rank)
    for bit in reversed(range(max(1, (size - 1).bit_length()))):
        is_zero = (current >> bit) & 1 == 0
        before = torch.nn.functional.pad(is_zero.long().cumsum(-1), (1, 0))
        zeros = before[..., -1:]
        low_zeros, high_zeros = before.gather(-1, low), before.gather(-1, high)
        found = high_zeros - low_zeros
        left = wanted <= found
        cutoff = torch.where(left, cutoff, cutoff | (1 << bit))
        low = torch.where(left, low_zeros, zeros + low - low_zeros)
        high = torch.where(left, high_zeros, zeros + high - high_zeros)
        wanted = torch.where(left, wanted, wanted - found)
        # A stable partition by this bit: zeros keep their order in front, ones behind them.
        behind = zeros + torch.arange(length, device=rank.device) - before[..., :-1]
        current = torch.empty_like(current).scatter_(-1, torch.where(is_zero, before[..., :-1], behind), current)
    return torch.where(eligible >= k, cutoff, size)


def keep_mask(rank: Tensor, cutoff: Tensor, sinks: int, window: int, queries: slice | Tensor = slice(None)) -> Tensor:
    """Which keys each query sees [..., Q, S]: sinks, the window, and the running top-k; `queries` selects the rows."""
    size = rank.shape[-1]
    key = torch.arange(size, device=rank.device)
    query = key[queries, None]
    chosen = rank[..., None, :] <= cutoff[..., queries, None]
    return (key <= query) & ((key < sinks) | (key > query - window) | chosen)


@dataclass(frozen=True)
class Kept:
    """What a whole sequence keeps at every query, in O(S) memory a head.

    Attributes:
        rank: of each token [..., S], see `ranks`.
        cutoff: at each query [..., S], see `running_cutoff`.
        sinks, window: protected tokens.
    """

    rank: Tensor
    cutoff: Tensor
    sinks: int
    window: int

    @classmethod
    def of(cls, priority: Tensor, sinks: int, window: int, k: int) -> Self:
        """What a static priority [..., S] keeps: the running top-k."""
        rank = ranks(priority)
        return cls(rank, running_cutoff(rank, sinks, window, k), sinks, window)

    @classmethod
    def all_but(cls, evicted: Tensor, sinks: int, window: int) -> Self:
        """What is left if each token [..., S] (bool: evicted) goes when it leaves the window, however many that are."""
        return cls(evicted.long(), torch.zeros_like(evicted, dtype=torch.int64), sinks, window)

    def mask(self, queries: slice | Tensor = slice(None)) -> Tensor:
        """Which keys each query sees [..., Q, S], bool; `queries` selects some, as a slice or as indices [Q]."""
        return keep_mask(self.rank, self.cutoff, self.sinks, self.window, queries)

    def long(self, queries: Tensor) -> Tensor:
        """Which tokens outside sinks and window each of some queries [..., N] sees [..., N, S], bool."""
        token = torch.arange(self.rank.shape[-1], device=self.rank.device)
        eligible = (token >= self.sinks) & (token <= queries[..., None] - self.window)
        return eligible & (self.rank[..., None, :] <= self.cutoff.gather(-1, queries)[..., None])
