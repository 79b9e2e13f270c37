"""Slow, readable truths that the fast paths of this package are held to. Tests only."""

from __future__ import annotations

import torch
from torch import Tensor


def fenwick_cutoff(rank: list[int], sinks: int, window: int, k: int) -> list[int]:
    """`ranking.running_cutoff` of one head with a Fenwick tree (docs/kvpop.md 2.3)."""
    size = len(rank)
    tree = [0] * (size + 1)
    cutoff, count = [], 0
    for query in range(size):
        leaving = query - window
        if leaving >= sinks:
            count += 1
            node = rank[leaving] + 1
            while node <= size:
                tree[node] += 1
                node += node & -node
        if k == 0:
            cutoff.append(-1)
        elif count < k:
            cutoff.append(size)
        else:
            place, remaining = 0, k
            for bit in reversed(range(size.bit_length() + 1)):
                step = place + (1 << bit)
                if step <= size and tree[step] < remaining:
                    place, remaining = step, remaining - tree[step]
            cutoff.append(place)
    return cutoff


def streamed_sets(priority: list[float], sinks: int, window: int, k: int) -> list[set[int]]:
    """The tokens of one head retained at each step, one token at a time: the lowest priority leaves, then the oldest."""
    long: list[int] = []
    kept = []
    for query in range(len(priority)):
        leaving = query - window
        if leaving >= sinks:
            long.append(leaving)
            if len(long) > k:
                long.remove(min(long, key=lambda t: (priority[t], t)))
        kept.append(set(range(min(sinks, query + 1))) | set(range(max(0, query - window + 1), query + 1)) | set(long))
    return kept


def future_mass(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    window: int,
    power: float = 1.0,
    lookahead: int = 0,
    count: bool = True,
) -> Tensor:
    """`future_mass.future_mass` by an explicit softmax: queries [Hq, S, D], keys [H, S, D] -> log mean mass [Hq, S]."""
    size = queries.shape[1]
    group = queries.shape[0] // keys.shape[0]
    logits = queries.double() @ keys.double().repeat_interleave(group, 0).transpose(-1, -2) * scale
    logits = logits.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -torch.inf)
    weights = logits.softmax(-1)
    out = torch.full((queries.shape[0], size), -torch.inf, dtype=torch.float64)
    for token in range(size - window):
        last = min(size - 1, token + window + lookahead) if lookahead else size - 1
        received = weights[:, token + window : last + 1, token].pow(power)
        out[:, token] = (received.mean(-1) if count else received.sum(-1)).log() / power
    return out
