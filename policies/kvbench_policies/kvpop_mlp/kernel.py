"""Triton kernel: the two-layer scorer of one token a row, in one launch.

A program scores a block of rows in one KV head, some of the hidden numbers at a time; where these are all, it asks for the
weights before the launch before it has ended. Plain form: `MlpScorer` and `DmsGate`, with `Scorer.priority`. All sums are fp32
as there.

Shapes: R rows, H KV heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.core.policy import Tokens
from kvbench.kernels import overlap
from kvbench.kernels.overlap import after_the_last


class Blocks(NamedTuple):
    """How the launch is divided.

    Attributes:
        rows: that a program takes: 1, or 16 and more.
        hidden: numbers between the layers at a time.
        warps: of a program.
    """

    rows: int
    hidden: int
    warps: int


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _score(  # type: ignore[no-untyped-def]
    key, value, inner, bias, outer, constant, log_gamma, positions, out,
    rows, heads, key_row, key_head, value_row, value_head, offset,
    PRECISION: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, CONSTANT: tl.constexpr, DECAYS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    r = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = r < rows
    d = tl.arange(0, DIM_PADDED)
    h = tl.arange(0, BLOCK_H)
    at = inner + (head * 2 * DIM + d)[:, None] * HIDDEN + h[None, :]
    WHOLE: tl.constexpr = HIDDEN <= BLOCK_H
    if WHOLE:
        wide = (d < DIM)[:, None] & (h < HIDDEN)[None, :]
        upper = tl.load(at, mask=wide, other=0.0).to(tl.float32)
        lower = tl.load(at + DIM * HIDDEN, mask=wide, other=0.0).to(tl.float32)
    after_the_last(OVERLAPS)
    inside = live[:, None] & (d < DIM)[None, :]
    k = tl.load(key + r[:, None] * key_row + head * key_head + d[None, :], mask=inside, other=0.0).to(tl.float32)
    v = tl.load(value + r[:, None] * value_row + head * value_head + d[None, :], mask=inside, other=0.0).to(tl.float32)
    score = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        here = start + h < HIDDEN
        if not WHOLE:
            wide = (d < DIM)[:, None] & here[None, :]
            upper = tl.load(at + start, mask=wide, other=0.0).to(tl.float32)
            lower = tl.load(at + start + DIM * HIDDEN, mask=wide, other=0.0).to(tl.float32)
        z = tl.load(bias + head * HIDDEN + start + h, mask=here, other=0.0).to(tl.float32)[None, :]
        a = tl.load(outer + head * HIDDEN + start + h, mask=here, other=0.0).to(tl.float32)
        if BLOCK_M == 1:
            z += tl.sum(upper * tl.trans(k) + lower * tl.trans(v), 0)[None, :]
        else:
            z += tl.dot(k, upper, input_precision=PRECISION)
            z += tl.dot(v, lower, input_precision=PRECISION)
        score += tl.sum(z / (1.0 + tl.exp(-z)) * a[None, :], 1)
    if CONSTANT:
        score += tl.load(constant + head).to(tl.float32)
    score = tl.where(score <= offset, float("-inf"), score)
    if DECAYS:
        score -= tl.load(positions + r, mask=live, other=0).to(tl.float32) * tl.load(log_gamma + head)
    tl.store(out + r * heads + head, score, mask=live)


def score(
    tokens: Tokens,
    inner: Tensor,
    bias: Tensor,
    outer: Tensor,
    constant: Tensor | None = None,
    log_gamma: Tensor | None = None,
    offset: float = float("-inf"),
    blocks: Blocks | None = None,
) -> Tensor:
    """Priorities [R, H] in fp32 of one token a row.

    Args:
        tokens: keys and values [R, H, 1, D], any strides but along D.
        inner: [H, 2 D, hidden].
        bias: [H, 1, hidden].
        outer: [H, hidden, 1].
        constant: added to the score [H, 1, 1].
        log_gamma: decay of each head [H], fp32; none when left out.
        offset: scores that do not exceed it are -inf.
        blocks: see `Blocks`; chosen by the sizes when left out.
    """
    rows, heads, _, dim = tokens.keys.shape
    hidden = inner.shape[2]
    out = torch.empty(rows, heads, dtype=torch.float32, device=tokens.keys.device)
    blocks = blocks or best_blocks(rows, dim, hidden)
    both = tokens.keys, tokens.values
    _score[(heads, triton.cdiv(rows, blocks.rows))](
        *both, inner, bias, outer, out if constant is None else constant, out if log_gamma is None else log_gamma,
        tokens.positions, out, rows, heads, *(step for tensor in both for step in tensor.stride()[:2]), offset,
        # Three products of halves: fp32 but for the last bits, on matrix units.
        PRECISION="tf32x3", DIM=dim, DIM_PADDED=max(16, triton.next_power_of_2(dim)), HIDDEN=hidden,
        BLOCK_M=blocks.rows, BLOCK_H=max(16, min(blocks.hidden, triton.next_power_of_2(hidden))),
        CONSTANT=constant is not None, DECAYS=log_gamma is not None,
        num_warps=blocks.warps, num_stages=1, **overlap.options(out),
    )  # fmt: skip
    return out


def best_blocks(rows: int, dim: int, hidden: int) -> Blocks:
    """The fastest on an H200 for D and `hidden` 128: registers hold both halves of the weights. Larger ones come in pieces."""
    padded = max(16, int(triton.next_power_of_2(dim)))
    whole = 16384 // padded
    return Blocks(1 if rows == 1 else 16, whole if hidden <= whole else whole // 2, 8)
