"""The attention that a token receives after it has left the protected window: the target of KVpop's scorers.

`m_t = mean over d >= t + w of p_{d -> t}` with `p = exp(logit - LSE_d)`, computed as the transposed log-sum-exp over
queries of `logit - LSE_d` in blocks of keys (KVpop, section on the future-attention target; docs/kvpop.md 3). Nothing S x S is
held at once. The power mean `(mean of p^a)^(1/a)` is ours: a = 1 is the paper's mean, a large a the largest single use.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.core.ranking import Kept

_FLOOR = 1e-9


def future_logsumexp(
    queries: Tensor,
    keys: Tensor,
    normaliser: Tensor,
    scale: float,
    window: int,
    block: int = 1024,
    *,
    lengths: Tensor | None = None,
    lookahead: int = 0,
    power: float = 1.0,
) -> Tensor:
    """Log of the summed powers of the future attention per query head, in blocks of keys.

    Args:
        queries: [R, Hq, S, D] after RoPE.
        keys: [R, H, S, D] after RoPE.
        normaliser: log-sum-exp of each query's logits [R, Hq, S], over all earlier tokens (dense) or the retained (sparse).
        scale: factor of the dot product.
        window: protected tokens w; the first query that can miss token t is t + w.
        block: keys handled at once.
        lengths: true length of each row [R]; later queries are padding and count for nothing. None: all are real.
        lookahead: the last query that counts for token t is t + w + lookahead; 0 for no such limit.
        power: exponent of each attention weight.

    Returns:
        [R, Hq, S] fp32; -inf for tokens without a real query after their window.
    """
    rows, heads, size, _ = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size, -1)
    query = torch.arange(size, device=queries.device)
    if lengths is not None:
        # A padded query with an infinite normaliser gives every token the mass zero.
        normaliser = normaliser.masked_fill((query >= lengths[:, None])[:, None], torch.inf)
    shift = normaliser.reshape(rows, kv_heads, heads // kv_heads, 1, size)
    out = queries.new_full((rows, kv_heads, heads // kv_heads, size), -torch.inf, dtype=torch.float32)
    for start in range(0, size - window, block):
        stop = min(start + block, size - window)
        # Queries before start + window see none of this block's keys after their window.
        first, last = start + window, min(size, stop + window + lookahead) if lookahead else size
        logits = (
            torch.einsum("rhtd,rhgsd->rhgts", keys[:, :, start:stop].float(), grouped[..., first:last, :].float())
            * scale
        )
        logits -= shift[..., first:last]
        age = query[first:last] - query[start:stop, None] - window
        logits.masked_fill_((age < 0) | (age > lookahead) if lookahead else age < 0, -torch.inf)
        out[..., start:stop] = logits.mul_(power).logsumexp(-1)
    return out.reshape(rows, heads, size)


def future_mass(
    log_sums: Tensor,
    window: int,
    *,
    lengths: Tensor | None = None,
    lookahead: int = 0,
    count: bool = True,
    power: float = 1.0,
) -> Tensor:
    """Log power mean of the future attention per query head [R, Hq, S], from `future_logsumexp` with the same settings.

    Args:
        log_sums: [R, Hq, S].
        window: protected tokens.
        lengths: true length of each row [R].
        lookahead: see `future_logsumexp`.
        power: exponent of each attention weight, and its inverse of their mean.
        count: the mean over the queries that count; otherwise their sum (the ablation: it favours early tokens).
    """
    if not count:
        return log_sums / power
    size = log_sums.shape[-1]
    query = torch.arange(size, device=log_sums.device)
    end = torch.full((1,), size, device=query.device) if lengths is None else lengths
    counted = (end[:, None] - window - query).clamp(min=1)
    if lookahead:
        counted = counted.clamp(max=lookahead + 1)
    return (log_sums - counted.float().log()[:, None]) / power


def normaliser(queries: Tensor, keys: Tensor, scale: float, kept: Kept | None = None, block: int = 1024) -> Tensor:
    """Log-sum-exp of each query's logits [R, Hq, S], over all earlier tokens or over those it still sees, in blocks of queries.

    Args:
        queries: [R, Hq, S, D].
        keys: [R, H, S, D].
        scale: factor of the dot product.
        kept: what each query sees; None for the dense normaliser.
        block: queries handled at once.
    """
    rows, heads, size, dim = queries.shape
    kv_heads = keys.shape[1]
    # Scaled here, not where there are S times as many numbers.
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size, dim).float() * scale
    out = grouped.new_empty(rows, kv_heads, heads // kv_heads, size)
    position = torch.arange(size, device=queries.device)
    for start in range(0, size, block):
        stop = min(start + block, size)
        # Later keys than the block's last query are seen by none of its queries.
        logits = grouped[..., start:stop, :] @ keys[:, :, None, :stop].float().transpose(-1, -2)
        if kept is None:
            seen = position[:stop] <= position[start:stop, None]
        else:
            seen = kept.mask(slice(start, stop))[:, :, None, :, :stop]
        out[..., start:stop] = logits.masked_fill_(~seen, -torch.inf).logsumexp(-1)
    return out.reshape(rows, heads, size)


def group_target(log_mass: Tensor, kv_heads: int, group: str = "max") -> Tensor:
    """Target score [R, H, S] from the log mass of query heads [R, Hq, S], floored at 1e-9.

    Args:
        log_mass: of each query head.
        kv_heads: H.
        group: `max` over the query heads that share a KV head, or the log of their `mean` mass.
    """
    rows, heads, size = log_mass.shape
    grouped = log_mass.view(rows, kv_heads, heads // kv_heads, size)
    over = grouped.logsumexp(2) - math.log(heads // kv_heads) if group == "mean" else grouped.amax(2)
    return torch.logaddexp(over, over.new_tensor(_FLOOR).log())
