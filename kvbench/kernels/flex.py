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
    partial, full = visible.blocks()
    # Query blocks by key block are what the backward pass walks along.
    wanted = torch.stack((partial, full, partial.mT, full.mT)).to(torch.int32)
    numbers = wanted.sum(-1, dtype=torch.int32)
    indices = wanted.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    by_head = visible.rank is not None
    lists = [
        (part.repeat_interleave(group, 0) if by_head else part)[None].contiguous()
        for pair in zip(numbers, indices, strict=True)
        for part in pair
    ]
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    more = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    return BlockMask(
        seq_lengths=(len(visible.near), len(visible.near)),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_mask_mod(visible, group),
        **dict(zip((*names, *more), lists, strict=True)),
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
        score_mod: changes logits, see torch.
        kernel: takes the place of the compiled one in tests.
    """
    rows, _, size, _ = query.shape
    mask = block_mask(visible, query.shape[1] // key.shape[1])
    given = [_end_to_end(tensor, len(visible.near)) for tensor in (query, key, value)]
    with (
        torch.autocast(query.device.type, enabled=False),
        torch._dynamo.config.patch(recompile_limit=_LENGTHS, accumulated_recompile_limit=4 * _LENGTHS),
    ):
        out, lse = (kernel or _compiled())(*given, mask, scale, score_mod)
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


def _mask_mod(visible: Visible, group: int) -> Any:
    near, rank, cutoff = visible.near, visible.rank, visible.cutoff
    if rank is None or cutoff is None:

        def causal(b: Tensor, h: Tensor, q: Tensor, t: Tensor) -> Tensor:  # noqa: ARG001 - the kernel's signature
            return (t <= q) & (t > near[q])

        return causal

    def ranked(b: Tensor, h: Tensor, q: Tensor, t: Tensor) -> Tensor:  # noqa: ARG001 - the kernel's signature
        return (t <= q) & ((t > near[q]) | (rank[h // group, t] <= cutoff[h // group, q]))

    return ranked


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
