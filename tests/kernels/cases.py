"""Kept sets that are awkward for blocks, and the explicit softmax that attention over them is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.core.ranking import Kept

# rows, KV heads, tokens, sinks, window, k, different priorities
CASES = [
    (1, 1, 40, 0, 1, 0, 40),
    (1, 2, 40, 2, 8, 5, 3),
    (3, 2, 33, 3, 7, 6, 40),
    (2, 1, 64, 4, 16, 12, 5),
    (2, 2, 24, 2, 24, 4, 40),
    (2, 1, 25, 9, 40, 3, 40),
    (1, 1, 50, 60, 2, 3, 40),
    (4, 1, 16, 0, 8, 40, 1),
]

# The same of longer rows: in blocks of 8, late ones read what is beyond their window in order of rank.
LATE = [
    (1, 2, 128, 2, 8, 10, 128),
    (1, 1, 250, 0, 1, 20, 4),
    (1, 2, 200, 3, 17, 1, 200),
    (3, 2, 131, 3, 8, 9, 200),
    (2, 1, 150, 4, 16, 12, 5),
    (2, 2, 100, 9, 5, 2, 100),
]


def kept_of(rows: int, heads: int, size: int, sinks: int, window: int, k: int, values: int) -> Kept:
    """What random priorities keep; few different values make ties."""
    return Kept.of(torch.randint(values, (rows, heads, size)).float(), sinks, window, k)


def explicit(query: Tensor, key: Tensor, value: Tensor, added: Tensor, scale: float) -> Tensor:
    """Attention [R, Hq, S, D] with something added to all logits [R, H, S, S], in float64."""
    group = query.shape[1] // key.shape[1]
    key, value, added = (tensor.double().repeat_interleave(group, 1) for tensor in (key, value, added))
    return (query.double() @ key.mT * scale + added).softmax(-1) @ value


def as_added(mask: Tensor) -> Tensor:
    """A mask as what is added to logits."""
    return torch.zeros(mask.shape).to(mask.device).masked_fill(~mask, -torch.inf)
