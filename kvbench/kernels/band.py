"""A Triton kernel: log-sum-exp of dot products over a band of columns, one row of the result for each row of the band.

    out[i] = log sum over j in [i + first, i + last], 0 <= j < length, of exp( power (scale x_i . y_j - bias_j) )

Two passes over a whole sequence are of this form (docs/kvpop.md 3): the log-normalisers of causal attention, with queries as x
and keys as y; and the future-attention target, transposed, with keys as x and queries as y. Each is half of an attention
forward pass, since there are no values. One program takes a block of x and walks along the blocks of y; sums are kept in fp32
and are relative to a running maximum, so that no power and no sparse normaliser overflows.

Source: online softmax (Milakov and Gimelshein, arXiv:1805.02867); the transposition is KVpop's.

Shapes: R rows, S tokens, D head dimension; x has Hx heads and y has Hy, one of them a multiple of the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = 1.4426950408889634


class Blocks(NamedTuple):
    """How a program works: rows of x and columns of y in a block, warps, and blocks of y on their way at once."""

    rows: int
    columns: int
    warps: int
    stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, dim: int) -> Blocks:
        """What fits registers and shared memory without spilling, two programs at once, on compute capability 9.0."""
        if dtype == torch.float32:
            return cls(32, 32, 4, 2) if dim <= 128 else cls(16, 16, 4, 1)
        return cls(128, 64, 4, 3) if dim <= 128 else cls(64, 32, 4, 2)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _fold(  # type: ignore[no-untyped-def]
    x, y_at, bias_at, j, i, top, total, factor, slope, first, last, length, live,
    BIASED: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes a block of columns into the running maximum and sum of each row, both to the base 2."""
    if WHOLE and EVEN:
        y = tl.load(y_at)
    else:
        y = tl.load(y_at, mask=live & (j < length)[None, :], other=0.0)
    logits = tl.dot(x, y, input_precision=PRECISION) * factor
    if BIASED:
        logits -= (tl.load(bias_at, mask=j < length, other=0.0) * slope)[None, :]
    if not WHOLE:
        ahead = j[None, :] - i[:, None]
        logits = tl.where((ahead >= first) & (ahead <= last) & (j < length)[None, :], logits, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, 1))
    # Where nothing has been seen yet, the difference of two infinities would not be a number.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    total = total * tl.exp2(top - level) + tl.sum(tl.exp2(logits - level[:, None]), 1)
    return higher, total


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _band(  # type: ignore[no-untyped-def]
    x, y, bias, lengths, out,
    x_row, x_head, x_token, y_row, y_head, y_token,
    heads, x_group, y_group, size, factor, slope, first, last,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BIASED: tl.constexpr, REVERSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if REVERSED:
        # The longest walks start first.
        block = tl.num_programs(0) - 1 - block
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    length = tl.load(lengths + row)
    x += row * x_row + (head // x_group) * x_head
    y += row * y_row + (head // y_group) * y_head
    bias += (row * heads + head) * size
    out += (row * heads + head) * size

    start = block * ROWS
    i = start + tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PADDED)
    EVEN: tl.constexpr = DIM == DIM_PADDED
    live = (d < DIM)[:, None]
    held = tl.load(
        x + i[:, None].to(tl.int64) * x_token + d[None, :], mask=(i < size)[:, None] & (d < DIM)[None, :], other=0.0
    )
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    # Columns that any row needs, and among them blocks of which every row needs every column.
    begin = tl.maximum(0, start + first) // COLUMNS * COLUMNS
    end = tl.minimum(length, start + ROWS + last)
    whole_begin = tl.cdiv(tl.maximum(0, start + ROWS - 1 + first), COLUMNS) * COLUMNS
    whole_end = tl.maximum(tl.minimum(length, start + last + 1), 0) // COLUMNS * COLUMNS
    whole_begin = tl.minimum(tl.maximum(whole_begin, begin), tl.maximum(end, begin))
    whole_end = tl.maximum(whole_end, whole_begin)
    columns = tl.arange(0, COLUMNS)
    for place in range(begin, tl.minimum(whole_begin, end), COLUMNS):
        j = place + columns
        at = y + j[None, :].to(tl.int64) * y_token + d[:, None]
        top, total = _fold(
            held, at, bias + j, j, i, top, total, factor, slope,
            first, last, length, live, BIASED, False, EVEN, PRECISION,
        )  # fmt: skip
    for place in range(whole_begin, whole_end, COLUMNS):
        j = place + columns
        at = y + j[None, :].to(tl.int64) * y_token + d[:, None]
        top, total = _fold(
            held, at, bias + j, j, i, top, total, factor, slope,
            first, last, length, live, BIASED, True, EVEN, PRECISION,
        )  # fmt: skip
    for place in range(whole_end, end, COLUMNS):
        j = place + columns
        at = y + j[None, :].to(tl.int64) * y_token + d[:, None]
        top, total = _fold(
            held, at, bias + j, j, i, top, total, factor, slope,
            first, last, length, live, BIASED, False, EVEN, PRECISION,
        )  # fmt: skip
    # A row without a column has the logarithm of nothing.
    tl.store(out + i, tl.where(total > 0, (top + tl.log2(total)) * 0.6931471805599453, float("-inf")), mask=i < size)


def band_logsumexp(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    scale: float,
    first: int,
    last: int,
    lengths: Tensor,
    power: float = 1.0,
    blocks: Blocks | None = None,
) -> Tensor:
    """Log-sum-exp over a band [R, H, S] in fp32, where H is the larger of Hx and Hy; -inf where the band is empty.

    Args:
        x: [R, Hx, S, D].
        y: [R, Hy, S, D], of the same number type.
        bias: subtracted from the logits of each column, for each head [R, H, S] in fp32; None for nothing.
        scale: factor of the dot product.
        first: the band of row i begins at column i + first.
        last: it ends with column i + last.
        lengths: columns that count in each row of the batch [R].
        power: factor of logits and bias.
        blocks: how programs work; chosen by number type and head dimension when None.
    """
    count, x_heads, size, dim = x.shape
    y_heads = y.shape[1]
    heads = max(x_heads, y_heads)
    x, y = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (x, y))
    out = torch.empty(count, heads, size, dtype=torch.float32, device=x.device)
    padded = max(16, triton.next_power_of_2(dim))
    blocks = blocks or Blocks.of(x.dtype, padded)
    grid = (triton.cdiv(size, blocks.rows), count * heads)
    _band[grid](
        x, y, out if bias is None else bias.contiguous(), lengths.to(torch.int32), out,
        *x.stride()[:3], *y.stride()[:3],
        heads, heads // x_heads, heads // y_heads, size,
        scale * power * _LOG2E, power * _LOG2E, max(first, -size), min(last, size),
        DIM=dim, DIM_PADDED=padded, ROWS=blocks.rows, COLUMNS=blocks.columns,
        # fp32 means fp32: tf32 has the mantissa of fp16, and a power of 8 would multiply its error.
        BIASED=bias is not None, REVERSED=first < 0, PRECISION="ieee",
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out
