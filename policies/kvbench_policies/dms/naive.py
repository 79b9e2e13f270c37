"""Gate, relaxation and retained sets one token at a time in float64. Tests only."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def scores(weights: Mapping[str, Tensor], keys: Tensor, values: Tensor) -> Tensor:
    """`DmsGate.forward` [R, H, S] from its named parameters (float64) and keys and values [R, H, S, D]."""
    rows, heads, size, _ = keys.shape
    out = []
    for row in range(rows):
        for head in range(heads):
            for token in range(size):
                x = torch.cat([keys[row, head, token], values[row, head, token]]).double()
                z = weights["inner"][head].T.mv(x) + weights["bias"][head, 0]
                hidden = z / (1 + torch.exp(-z))
                out.append(hidden.dot(weights["outer"][head, :, 0]) + weights["constant"][head, 0, 0])
    return torch.stack(out).view(rows, heads, size)


def closed(score: float, offset: float, noise: float, temperature: float) -> float:
    """How far a gate is closed: the logistic relaxation of "dropped" with logistic noise from a uniform number."""
    logit = (offset - score + math.log(noise) - math.log(1 - noise)) / temperature
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0


def streamed_sets(scores: list[float], offset: float, sinks: int, window: int) -> list[set[int]]:
    """The tokens of one head retained at each step."""
    kept: set[int] = set()
    steps = []
    for query in range(len(scores)):
        kept.add(query)
        leaving = query - window
        if leaving >= sinks and scores[leaving] <= offset:
            kept.remove(leaving)
        steps.append(set(kept))
    return steps
