"""The next token of each row: greedy, or drawn from a random stream that belongs to the request alone.

Random numbers are a hash of (request seed, index of the new token, vocabulary entry). Nothing is consumed, so the order of
rows, refills and batches cannot change an answer, and the draw survives CUDA graph capture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.core.hashing import uniform
from kvbench.engine.requests import Sampling

NEAR_TIE = 1e-3
"""Two best logits closer than this may swap places between batch shapes, devices or attention paths."""

_STREAM = 1
"""Keeps these numbers apart from what policies draw from the same seed."""


def choose(logits: Tensor, sampling: Sampling, seeds: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Next token ids [R] and near ties [R] (bool) from logits [R, V].

    Args:
        logits: of the last position.
        sampling: greedy at temperature 0; otherwise temperature, top-k, top-p in this order.
        seeds: of the requests [R], int64.
        index: how many tokens each row has produced so far [R], int64.
    """
    logits = logits.float()
    best = logits.topk(2, dim=-1).values
    near = best[:, 0] - best[:, 1] < NEAR_TIE
    if sampling.temperature == 0:
        return logits.argmax(-1), near
    logits = _filtered(logits / sampling.temperature, sampling)
    entries = torch.arange(logits.shape[-1], device=logits.device)
    noise = uniform(entries.new_full((), _STREAM), seeds[:, None], index[:, None], entries[None])
    return (logits - (-noise.log()).log()).argmax(-1), near


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    if 0 < sampling.top_k < logits.shape[-1]:
        lowest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        weights = ordered.softmax(-1)
        # A token stays while the mass before it is below top_p, so that at least one always does.
        dropped = weights.cumsum(-1) - weights >= sampling.top_p
        dropped[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    return logits
