"""The one function through which a transformers model reaches the engine, and the attention it computes.

The function is registered with the attention interface and deliberately *not* with the mask interface: for a name
without a mask function transformers hands out no mask at all, and masking is the engine's own.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from kvbench.core.errors import KvbenchError

NAME = "kvbench"


class Attending(Protocol):
    """What a model call carries in its extra keyword `kvbench`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """New tokens' query [R, Hq, T, D], key and value [R, H, T, D] after RoPE -> output [R, Hq, T, D]."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kvbench: Attending,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layer = module.layer_idx
    assert isinstance(layer, int)
    for extra, what in (
        (attention_mask, "a mask of its own"),
        (softcap, "soft-capped logits"),
        (s_aux, "learned sinks"),
    ):
        if extra is not None:
            raise KvbenchError(f"Attention with {what} ({type(module).__name__}) is not supported by kvbench.")
    return kvbench.attend(layer, query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def over_slots(query: Tensor, keys: Tensor, values: Tensor, occupied: Tensor | None, scale: float) -> Tensor:
    """One query a row over its slots: [R, Hq, 1, D] x [R, H, B, D] -> [R, Hq, 1, D].

    The query heads of a group become the queries of one KV head, so that keys and values are read once.
    `occupied` [R, H, B] masks empty slots; None when there are none.
    """
    rows, heads, _, dim = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, dim)
    mask = None if occupied is None else occupied[:, :, None].expand(-1, -1, grouped.shape[2], -1)
    out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, 1, dim)


def with_weights(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Explicit softmax in fp32: query [R, Hq, T, D] -> output [R, Hq, T, D] and weights [R, Hq, T, B].

    `visible` is boolean, broadcastable to [R, H, 1, T, B]; None when every query sees every slot.
    """
    rows, heads, tokens, dim = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, tokens, dim)
    logits = torch.einsum("rhgtd,rhbd->rhgtb", grouped, keys).float() * scale
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    weights = logits.softmax(-1)
    out = torch.einsum("rhgtb,rhbd->rhgtd", weights.to(values.dtype), values)
    return out.reshape(rows, heads, tokens, dim), weights.reshape(rows, heads, tokens, -1)


def causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Dense causal attention of a prompt: query [R, Hq, T, D], keys and values [R, H, T, D]."""
    return functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)


def under_mask(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of a block of queries [R, Hq, Q, D] under a boolean mask [R, H, Q, T]."""
    group = query.shape[1] // keys.shape[1]
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask.repeat_interleave(group, 1), scale=scale, enable_gqa=True
    )
