"""The attention that a token receives after it has left the protected window: the target of KVpop's scorers.

`m_t = mean over d >= t + w of p_{d -> t}` with `p = exp(logit - LSE_d)`, computed as the transposed log-sum-exp over
queries of `logit - LSE_d` in blocks of keys (KVpop, section on the future-attention target; docs/kvpop.md 3). Nothing S x S is
held at once. The power mean `(mean of p^a)^(1/a)` is ours: a = 1 is the paper's mean, a large a the largest single use.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOOR = 1e-9


def future_mass(
    queries: Tensor, keys: Tensor, normaliser: Tensor, scale: float, window: int, block: int = 1024, power: float = 1.0
) -> Tensor:
    """Log power mean of the future attention per query head.

    Args:
        queries: [R, Hq, S, D] after RoPE.
        keys: [R, H, S, D] after RoPE.
        normaliser: log-sum-exp of each query's logits [R, Hq, S], over all earlier tokens (dense) or the retained (sparse).
        scale: factor of the dot product.
        window: protected tokens w; the first query that can miss token t is t + w.
        block: keys handled at once.
        power: exponent a > 0 of the mean.

    Returns:
        [R, Hq, S] fp32; -inf for the last `window` tokens, which have no future outside the window.
    """
    rows, heads, size, _ = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size, -1)
    shift = normaliser.reshape(rows, kv_heads, heads // kv_heads, 1, size)
    query = torch.arange(size, device=queries.device)
    out = queries.new_full((rows, kv_heads, heads // kv_heads, size), -torch.inf, dtype=torch.float32)
    for start in range(0, size - window, block):
        stop = min(start + block, size - window)
        # Queries before start + window see none of this block's keys after their window.
        first = start + window
        logits = (
            torch.einsum("rhtd,rhgsd->rhgts", keys[:, :, start:stop].float(), grouped[..., first:, :].float()) * scale
        )
        logits -= shift[..., first:]
        logits.masked_fill_(query[first:] < query[start:stop, None] + window, -torch.inf)
        out[..., start:stop] = logits.mul_(power).logsumexp(-1)
    count = (size - window - query).clamp(min=1)
    return ((out - count.float().log()) / power).reshape(rows, heads, size)


def group_target(log_mass: Tensor, kv_heads: int) -> Tensor:
    """Target score [R, H, S] from the log mass of query heads [R, Hq, S]: the maximum over the group, floored at 1e-9."""
    rows, heads, size = log_mass.shape
    floor = torch.tensor(_FLOOR, device=log_mass.device).log()
    return torch.logaddexp(log_mass, floor).view(rows, kv_heads, heads // kv_heads, size).amax(2)
