"""The log-sum-exps of the future-attention target, by a Triton kernel on GPUs and in plain blocks elsewhere (docs/kvpop.md 3).

Shapes: R rows, Hq query heads, H KV heads, S tokens, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.core import future_mass
from kvbench.core.ranking import Kept
from kvbench.kernels import check
from kvbench.kernels.attention import attention_over, has_kernel


@torch.no_grad()
def normaliser(queries: Tensor, keys: Tensor, scale: float, kept: Kept | None = None) -> Tensor:
    """Log-sum-exp of each query's logits [R, Hq, S] in fp32, over all earlier tokens or over those it still sees.

    Args:
        queries: [R, Hq, S, D].
        keys: [R, H, S, D], of the same number type.
        scale: factor of the dot product.
        kept: what each query sees; None for all earlier tokens.

    Raises:
        KvbenchError: the kernel does not work on this machine.
    """
    if not has_kernel(queries):
        return future_mass.normaliser(queries, keys, scale, kept)
    if kept is not None:
        found = attention_over(queries, keys, keys, kept, scale)[1]
        assert found is not None
        return found
    from kvbench.kernels.band import band_logsumexp

    size = queries.shape[2]
    whole = torch.full((len(queries),), size, device=queries.device)
    found = band_logsumexp(queries, keys, None, scale, -size, 0, whole)

    def plain(index: Tensor) -> Tensor:
        group = queries.shape[1] // keys.shape[1]
        logits = queries[0][:, index].float() @ keys[0].float().repeat_interleave(group, 0).mT * scale
        ahead = torch.arange(size, device=index.device) > index[:, None]
        return logits.masked_fill(ahead, -torch.inf).logsumexp(-1)

    check.once("causal log-sum-exp", found, queries, plain)
    return found


@torch.no_grad()
def future_logsumexp(
    queries: Tensor,
    keys: Tensor,
    normalisers: Tensor,
    scale: float,
    window: int,
    lengths: Tensor,
    lookahead: int = 0,
    power: float = 1.0,
) -> Tensor:
    """Log of the summed powers of the future attention [R, Hq, S] in fp32, see `core.future_mass.future_logsumexp`.

    Args:
        queries: [R, Hq, S, D].
        keys: [R, H, S, D], of the same number type.
        normalisers: of each query [R, Hq, S].
        scale: factor of the dot product.
        window: protected tokens.
        lengths: true length of each row [R].
        lookahead: queries after the window's end that count beyond the first; 0 for all of them.
        power: exponent of each attention weight.

    Raises:
        KvbenchError: the kernel does not work on this machine.
    """
    if not has_kernel(queries):
        return future_mass.future_logsumexp(
            queries, keys, normalisers, scale, window, lengths=lengths, lookahead=lookahead, power=power
        )
    from kvbench.kernels.band import band_logsumexp

    size = queries.shape[2]
    last = window + lookahead if lookahead else size
    found = band_logsumexp(keys, queries, normalisers, scale, window, last, lengths, power)

    def plain(index: Tensor) -> Tensor:
        group = queries.shape[1] // keys.shape[1]
        picked = keys[0][:, index].float().repeat_interleave(group, 0)
        logits = picked @ queries[0].float().mT * scale - normalisers[0][:, None]
        query = torch.arange(size, device=index.device)
        age = query - index[:, None]
        out = (age < window) | (age > last) | (query >= lengths[0])
        return (power * logits).masked_fill(out, -torch.inf).logsumexp(-1)

    check.once("future log-sum-exp", found, queries, plain)
    return found
