"""The stateless scorer one token at a time in float64. Tests only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def scores(weights: Mapping[str, Tensor], keys: Tensor, values: Tensor) -> Tensor:
    """`MlpScorer.forward` [R, H, S] from its named parameters (float64) and keys and values [R, H, S, D]."""
    rows, heads, size, _ = keys.shape
    out = []
    for row in range(rows):
        for head in range(heads):
            for token in range(size):
                x = torch.cat([keys[row, head, token], values[row, head, token]]).double()
                z = weights["inner"][head].T.mv(x) + weights["bias"][head, 0]
                out.append((z / (1 + torch.exp(-z))).dot(weights["outer"][head, :, 0]))
    return torch.stack(out).view(rows, heads, size)
