"""The linear scorer one token at a time in float64. Tests only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def scores(weights: Mapping[str, Tensor], keys: Tensor, values: Tensor) -> Tensor:
    """`LinearScorer.forward` [R, H, S] from its named parameters (float64) and keys and values [R, H, S, D]."""
    rows, heads, size, dim = keys.shape
    out = []
    for row in range(rows):
        for head in range(heads):
            a = weights["weight"][head, :, 0]
            for token in range(size):
                from_key = a[:dim].dot(keys[row, head, token].double())
                out.append(from_key + a[dim:].dot(values[row, head, token].double()))
    return torch.stack(out).view(rows, heads, size)
