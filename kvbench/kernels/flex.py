"""FlexAttention over what queries see: the fused kernel of GPUs, forward and backward.

`torch.compile` runs when the first tensor comes, never at import. It is asked for static shapes, which is the form that torch
tests and tunes; `visible.padded` sees to it that there are few. Rows of a batch are laid end to end, so neither their number
nor their length is compiled in, only their sum.

Shapes: R rows, Hq query heads, H KV heads, S tokens, D head dimension, N = `visible.padded(R * S)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kvbench.kernels.visible import BLOCK, Visible

SMALLEST_HEAD = 16
"""Head dimension that the kernel's matrix products start at."""

_LENGTHS = 64
"""Compilations of one kind that are kept: lengths, number types, with and without gradient."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def block_mask(visible: Visible, group: int) -> BlockMask:
    """The kernel's lists of blocks, also those of its backward pass, for query heads in groups of `group`."""
    forward = torch.stack(visible.blocks())
    lists = []
    # Query blocks by key block are what the backward pass walks along.
    for wanted in (forward.to(torch.int32), forward.mT.to(torch.int32)):
        numbers = wanted.sum(-1, dtype=torch.int32)
        indices = wanted.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        lists += [part for pair in zip(numbers, indices, strict=True) for part in pair]
    if visible.far is not None:
        lists = [part.repeat_interleave(group, 0) for part in lists]
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    more = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    return BlockMask(
        seq_lengths=(forward.shape[-2] * BLOCK, forward.shape[-1] * BLOCK),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible.mask_mod(group),
        **dict(zip((*names, *more), (part[None].contiguous() for part in lists), strict=True)),
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    scale: float,
    score_mod: ScoreMod | None = None,
    kernel: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [R, Hq, S, D] and log-sum-exp of each query's visible logits [R, Hq, S], which has no gradient.

    Args:
        query: [R, Hq, S, D].
        key: [R, H, S, D], of the same number type.
        value: [R, H, S, D], likewise.
        visible: what each query sees.
        scale: factor of the dot product.
        score_mod: changes logits, see torch; it is given keys as `visible` numbers them.
        kernel: takes the place of the compiled one in tests.
    """
    rows, _, size, _ = query.shape
    mask = block_mask(visible, query.shape[1] // key.shape[1])
    query, key, value = (_end_to_end(tensor, len(visible.near)) for tensor in (query, key, value))
    if visible.far is not None:
        order = visible.far.order
        key, value = (_InBothOrders.apply(tensor, order) for tensor in (key, value))  # type: ignore[no-untyped-call]
    with (
        torch.autocast(query.device.type, enabled=False),
        torch._dynamo.config.patch(recompile_limit=_LENGTHS, accumulated_recompile_limit=4 * _LENGTHS),
    ):
        out, lse = (kernel or _compiled())(query, key, value, mask, scale, score_mod)
    return _apart(out, rows, size), _apart(lse, rows, size)


def uncompiled(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, score_mod: ScoreMod | None
) -> tuple[Tensor, Tensor]:
    """What is compiled."""
    out, aux = flex_attention(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return out, aux.lse.detach()


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(uncompiled, dynamic=False)


class _InBothOrders(torch.autograd.Function):
    """Tokens [1, H, N, D] in order of rank and then in order of time [1, H, 2 N, D], the order of rank [H, N].

    What autograd makes of a gather adds with atomics; but each token is in the order once.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Tensor) -> Tensor:
        index = order[None, :, :, None].expand_as(tensor)
        ctx.save_for_backward(order)
        return torch.cat((tensor.gather(2, index), tensor), 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        by_rank, by_time = grads[0].chunk(2, 2)
        index = ctx.saved_tensors[0][None, :, :, None].expand_as(by_rank)
        return torch.empty_like(by_time).scatter_(2, index, by_rank) + by_time, None


def _apart(tensor: Tensor, rows: int, size: int) -> Tensor:
    """[1, Hq, N, ...] -> [R, Hq, S, ...]."""
    real = tensor[0, :, : rows * size]
    return real.reshape(real.shape[0], rows, size, *real.shape[2:]).transpose(0, 1)


def _end_to_end(tensor: Tensor, size: int) -> Tensor:
    """[R, H, S, D] -> [1, H, N, D]."""
    if tensor.shape[0] > 1:
        tensor = tensor.transpose(0, 1).flatten(1, 2)[None]
    extra = size - tensor.shape[2]
    return functional.pad(tensor, (0, 0, 0, extra)) if extra else tensor
