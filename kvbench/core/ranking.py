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


def running_cutoff(rank: Tensor, sinks: int, window: int, k: int, bits: int = 0) -> Tensor:
    """Rank of the k-th best eligible token at each query [..., S]; S where fewer than k are eligible, -1 if k is 0.

    Token t is eligible at query q when sinks <= t <= q - window. Vectorised over everything but the digits of a rank: a
    wavelet tree's k-th smallest of a prefix, O(S log S) time and O(S) memory a head (docs/kvpop.md 2.3).

    Args:
        rank: of each token [..., S].
        sinks: first tokens, which are never eligible.
        window: newest tokens, which are not eligible yet.
        k: long-range slots.
        bits: of a rank that are decided at once. More of them are fewer but larger operations, which GPUs prefer; chosen by
            the device when 0.
    """
    size = rank.shape[-1]
    queries = torch.arange(size, device=rank.device)
    if k == 0:
        return torch.full_like(rank, -1)
    current = rank[..., sinks : max(size - window, sinks)]
    length = current.shape[-1]
    eligible = (queries - window - sinks + 1).clamp(0, length)
    bits = bits or (4 if rank.is_cuda else 2)
    branches = torch.arange(1 << bits, device=rank.device)[:, None]
    # For each query, which stretch of the tokens at this level holds those that it may choose from.
    low, high = torch.zeros_like(rank), eligible.expand_as(rank)
    wanted = torch.full_like(rank, k)
    cutoff = torch.zeros_like(rank)
    for shift in reversed(range(0, max(1, (size - 1).bit_length()), bits)):
        digit = (current >> shift) & (len(branches) - 1)
        # How many of the first n tokens have each digit [..., branches, n + 1].
        counts = (digit[..., None, :] == branches).to(torch.int32).cumsum(-1, dtype=torch.int32)
        counts = torch.nn.functional.pad(counts, (1, 0))
        before, after = _columns(counts, low), _columns(counts, high)
        below = (after - before).cumsum(-2)
        # The digit of the wanted token: that of the first branch which, with those before it, holds enough.
        chosen = (below < wanted[..., None, :]).sum(-2, keepdim=True).clamp(max=len(branches) - 1)
        before, after, below = (tensor.gather(-2, chosen)[..., 0, :] for tensor in (before, after, below))
        chosen = chosen[..., 0, :]
        cutoff = cutoff | (chosen << shift)
        wanted = wanted - (below - (after - before))
        # A stable sort by this digit: branches one after the other, their tokens in the old order.
        first = counts[..., -1].cumsum(-1) - counts[..., -1]
        start = first.gather(-1, chosen)
        low, high = before + start, after + start
        if shift:
            place = first.gather(-1, digit) + counts[..., 1:].gather(-2, digit[..., None, :])[..., 0, :] - 1
            current = torch.empty_like(current).scatter_(-1, place, current)
    return torch.where(eligible >= k, cutoff, size)


def _columns(counts: Tensor, index: Tensor) -> Tensor:
    """Columns `index` [..., S] of counts [..., branches, n]."""
    return counts.gather(-1, index[..., None, :].expand(*counts.shape[:-1], -1))


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
