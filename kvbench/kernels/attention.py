"""Attention of a whole sequence in which each query sees what its KV head keeps, without a matrix over all pairs.

On GPUs FlexAttention does it, in blocks that `visible.py` selects (docs/kvpop.md 2.5). The plain form below, in blocks of
queries, is the truth that tests hold it to, and what runs everywhere else.

Shapes: R rows, Hq query heads, H KV heads, S tokens, D head dimension, Q queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kvbench.core.ranking import Kept
from kvbench.kernels import check

_QUERIES = 1024
"""Queries of a block of the plain form."""


def attention_over(
    query: Tensor, key: Tensor, value: Tensor, kept: Kept, scale: float, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Attention [R, Hq, S, D] of each query over what its KV head keeps, and what its kernel leaves behind.

    Args:
        query: [R, Hq, S, D].
        key: [R, H, S, D].
        value: [R, H, S, D].
        kept: of [R, H, S].
        scale: factor of the dot product.
        lengths: true length of each row [R]; what lies behind it need not be computed, and is arbitrary.

    Returns:
        The output, and the log-sum-exp of each query's logits over what it sees [R, Hq, S] in fp32, without gradient;
        None where no kernel computes it.

    Raises:
        KvbenchError: the kernel does not work on this machine.
    """
    query, key, value = computed_in(query, key, value)
    if not has_kernel(query):
        return _in_blocks(query, key, value, scale, lambda block: kept.mask(block)), None
    from kvbench.kernels import flex
    from kvbench.kernels.visible import Visible

    out, lse = flex.attend(query, key, value, Visible.of(kept, lengths), scale)

    def plain(index: Tensor) -> Tensor:
        seen = Kept(kept.rank[:1], kept.cutoff[:1], kept.sinks, kept.window).mask(index)[0]
        if lengths is not None:
            itself = torch.arange(query.shape[2], device=index.device) == index[:, None]
            seen = torch.where((index < lengths[0])[:, None], seen, itself)
        return _log_sums(query[0][:, index], key[0], seen, scale)

    check.once("flex_attention", lse, query, plain)
    return out, lse


def biased_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, window: int, scale: float) -> Tensor:
    """Causal attention [R, Hq, S, D] with a bias of each key's logits as soon as it has left the window.

    Args:
        query: [R, Hq, S, D].
        key: [R, H, S, D].
        value: [R, H, S, D].
        bias: [R, H, S] in fp32; gets a gradient.
        window: the newest tokens, which have no bias yet.
        scale: factor of the dot product.
    """
    query, key, value = computed_in(query, key, value)
    if not has_kernel(query):
        return _in_blocks(query, key, value, scale, lambda block: biases(bias, window, block))
    from kvbench.kernels import flex
    from kvbench.kernels.visible import Visible

    rows, heads, size = bias.shape
    group = query.shape[1] // heads
    visible = Visible.causal(rows, size, query.device)
    flat = functional.pad(bias.transpose(0, 1).reshape(heads, rows * size), (0, len(visible.near) - rows * size))

    def add(score: Tensor, b: Tensor, h: Tensor, q: Tensor, t: Tensor) -> Tensor:  # noqa: ARG001 - the kernel's
        return score + torch.where(t <= q - window, flat[h // group, t], 0.0)

    return flex.attend(query, key, value, visible, scale, add)[0]


def biases(bias: Tensor, window: int, queries: slice = slice(None)) -> Tensor:
    """What `biased_attention` adds to logits [R, H, Q, S]: the bias outside the window, -inf ahead."""
    token = torch.arange(bias.shape[-1], device=bias.device)
    query = token[queries, None]
    return torch.where(token <= query - window, bias[..., None, :], 0.0).masked_fill(token > query, -torch.inf)


def has_kernel(query: Tensor) -> bool:
    """Whether a fused kernel takes queries [..., D] like these."""
    return query.shape[-1] >= 16 and check.available(query)


def computed_in(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the number type that autocast computes in, as torch's own attention would have them."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float, mask_of: Callable[[slice], Tensor]) -> Tensor:
    """The plain form: a block of queries at a time, each over the keys up to its end, made again in the backward pass."""
    size = query.shape[2]
    if size <= _QUERIES:
        return _under_mask(query, key, value, mask_of(slice(0, size)), scale)

    def part(start: int, stop: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = mask_of(slice(start, stop))[..., :stop]
        return _under_mask(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], mask, scale)

    out = []
    for start in range(0, size, _QUERIES):
        given = (start, min(size, start + _QUERIES), query, key, value)
        out.append(checkpoint(part, *given, use_reentrant=False) if torch.is_grad_enabled() else part(*given))
    return torch.cat(out, 2)


def _under_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention [R, Hq, Q, D] under a mask or bias [R, H, Q, S] that the query heads of a group share."""
    rows, heads, count, dim = query.shape
    kv_heads, size = key.shape[1:3]
    group = heads // kv_heads
    if mask.is_floating_point():
        mask = mask.to(query.dtype)
    # Rows and KV heads become the batch, so that one mask serves all query heads of its group.
    out = functional.scaled_dot_product_attention(
        query.reshape(rows * kv_heads, group, count, dim),
        key.reshape(rows * kv_heads, 1, size, dim).expand(-1, group, -1, -1),
        value.reshape(rows * kv_heads, 1, size, dim).expand(-1, group, -1, -1),
        attn_mask=mask.reshape(rows * kv_heads, 1, count, size),
        scale=scale,
    )
    return out.reshape(rows, heads, count, dim)


def _log_sums(query: Tensor, key: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Log-sum-exp [Hq, n] of the logits of queries [Hq, n, D] over those of the keys [H, S, D] that are seen [H, n, S]."""
    group = query.shape[0] // key.shape[0]
    logits = query.float() @ key.float().repeat_interleave(group, 0).mT * scale
    return logits.masked_fill(~seen.repeat_interleave(group, 0), -torch.inf).logsumexp(-1)
