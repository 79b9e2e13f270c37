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
"""Logits closer than this may swap places between batch shapes, devices or attention paths."""

_STREAM = 1
"""Keeps these numbers apart from what policies draw from the same seed."""


def choose(
    logits: Tensor, sampling: Sampling, seeds: Tensor, index: Tensor, kernels: bool = False
) -> tuple[Tensor, Tensor]:
    """Next token ids [R] and near ties [R] (bool) from logits [R, V].

    A near tie is one of the two best scores that decide: the logits themselves, or what sampling makes of them.

    Args:
        logits: of the last position.
        sampling: greedy at temperature 0; otherwise temperature, top-k, top-p in this order.
        seeds: of the requests [R], int64.
        index: how many tokens each row has produced so far [R], int64.
        kernels: the largest logit is found by a compiled kernel, in one pass.
    """
    if kernels and sampling.temperature == 0:
        from kvbench.kernels.best import best_of

        token, margin = best_of(logits)
        return token, margin < NEAR_TIE
    scores = logits.float()
    if sampling.temperature > 0:
        scores = _filtered(scores / sampling.temperature, sampling)
        entries = torch.arange(scores.shape[-1], device=scores.device)
        noise = uniform(entries.new_full((), _STREAM), seeds[:, None], index[:, None], entries[None])
        scores = scores - (-noise.log()).log()
    best = scores.topk(2, dim=-1).values
    # Scores are in units of the temperature, rounding is in those of the logits.
    near = (best[:, 0] - best[:, 1]) * (sampling.temperature or 1.0) < NEAR_TIE
    return scores.argmax(-1), near


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [R, V] with -inf outside top-k, then outside top-p; of equal logits the lower id comes first."""
    limited = 0 < sampling.top_k < logits.shape[-1]
    if not limited and sampling.top_p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if limited:
        ordered[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        weights = ordered.softmax(-1)
        # A token stays while the mass before it is below top_p, so that at least one always does.
        dropped = weights.cumsum(-1) - weights >= sampling.top_p
        dropped[:, 0] = False
        ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(logits).scatter(-1, order, ordered)
