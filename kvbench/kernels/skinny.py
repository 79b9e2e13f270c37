"""Triton kernels: products of a few rows with weight matrices, where reading the weights is all that counts.

    y = norm(x) W^T            norm: RMSNorm with a gain, or nothing; W one matrix, or up to three one below the other
    y = silu(x G^T) * (x U^T)  the same with a pair of matrices, as in a gated MLP
    y = r + x W^T              with a residual

All of them for one row, the gated pair for several too: for the others the library's products are faster.

Each program owns some rows of W and walks along them once. The norm costs no pass of its own: x times the gain goes into the
product, the sum of squares is taken along the way, and the result is scaled at the end. Sums are kept in fp32. One row of x is
multiplied element by element, several go through matrix instructions. Plain forms: `RMSNorm`, `linear` and the gated MLP of the
model itself.

Shapes: M rows of x, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels import overlap
from kvbench.kernels.overlap import after_the_last

Blocks = tuple[int, int, int, int]
"""Rows of W in a program, numbers along K at a time, warps and stages."""

MEASURED: dict[tuple[int, int, int, bool], Blocks] = {
    (1, 2560, 6144, False): (4, 256, 2, 1),
    (1, 4096, 2560, False): (1, 2048, 4, 1),
    (1, 2560, 9728, True): (4, 256, 4, 1),
    (1, 9728, 2560, False): (2, 1024, 4, 1),
    (1, 2560, 151936, False): (4, 256, 2, 1),
}
"""Fastest blocks in bf16 by rows of x in a program, K, N and gate: `python -m benchmarks.decode --only tune` on an H200."""


@triton.jit
def _rounded(y, like):  # type: ignore[no-untyped-def]
    """To the number type of the model and back, as between two of its operations."""
    return y.to(like.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _finished(  # type: ignore[no-untyped-def]
    y, up, squares, residual, out, at, mask, size, eps, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Norm, gate and residual of a block of results, and its store; numbers are rounded where the plain form rounds them."""
    if NORM:
        scale = 1.0 / tl.sqrt(squares / size + eps)
        y = y * scale
        up = up * scale
    y = _rounded(y, out)
    if GATED:
        y = _rounded(y / (1.0 + tl.exp(-y)), out) * _rounded(up, out)
    if ADD:
        y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _one_row(  # type: ignore[no-untyped-def]
    x, gain, first, second, third, residual, out, first_end, second_end, outputs, eps,
    SIZE: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BLOCK_N
    n = start + tl.arange(0, BLOCK_N)
    weight = first
    row = n
    if not GATED:
        # A block never lies across two matrices.
        if start >= second_end:
            weight = third
            row = n - second_end
        elif start >= first_end:
            weight = second
            row = n - first_end
    k = tl.arange(0, BLOCK_K)
    at = row.to(tl.int64)[:, None] * SIZE + k[None, :]
    inside = (n < outputs)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    tile = tl.load(weight + at, mask=inside & (k < SIZE)[None, :], other=0.0)
    if GATED:
        pair = tl.load(second + at, mask=inside & (k < SIZE)[None, :], other=0.0)
    after_the_last(OVERLAPS)
    for begin in range(0, SIZE, BLOCK_K):
        # The next tile is under way while this one is multiplied.
        later = (begin + BLOCK_K + k < SIZE)[None, :] & inside
        following = tl.load(weight + at + begin + BLOCK_K, mask=later, other=0.0)
        if GATED:
            other = tl.load(second + at + begin + BLOCK_K, mask=later, other=0.0)
        here = begin + k < SIZE
        value = tl.load(x + begin + k, mask=here, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(gain + begin + k, mask=here, other=0.0).to(tl.float32)
        acc += tile.to(tl.float32) * value[None, :]
        tile = following
        if GATED:
            ups += pair.to(tl.float32) * value[None, :]
            pair = other
    _finished(
        tl.sum(acc, 1), tl.sum(ups, 1), tl.sum(squares, 0), residual, out, n, n < outputs, SIZE, eps, NORM, GATED, ADD
    )


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _few_rows(  # type: ignore[no-untyped-def]
    x, gain, gates, ups, out, outputs, rows, eps,
    SIZE: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_the_last(OVERLAPS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    at = n.to(tl.int64)[:, None] * SIZE + k[None, :]
    inside = (n < outputs)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for begin in range(0, SIZE, BLOCK_K):
        here = (begin + k < SIZE)[None, :]
        value = tl.load(x + m[:, None] * SIZE + begin + k[None, :], mask=here & (m < rows)[:, None], other=0.0)
        gate = tl.load(gates + at + begin, mask=here & inside, other=0.0)
        up = tl.load(ups + at + begin, mask=here & inside, other=0.0)
        if NORM:
            exact = value.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            scaled = exact * tl.load(gain + begin + k, mask=begin + k < SIZE, other=0.0).to(tl.float32)[None, :]
            value = scaled.to(x.dtype.element_ty)
        acc += tl.dot(value, tl.trans(gate), input_precision=PRECISION)
        up_acc += tl.dot(value, tl.trans(up), input_precision=PRECISION)
    place = m[:, None].to(tl.int64) * outputs + n[None, :]
    mask = (m < rows)[:, None] & (n < outputs)[None, :]
    _finished(acc, up_acc, squares[:, None], x, out, place, mask, SIZE, eps, NORM, GATED=True, ADD=False)


def product(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Products [M, N] of rows x [M, K], in its number type: any of one row, and gated ones of several.

    Args:
        x: contiguous.
        weights: one to three contiguous matrices [N_i, K], whose results stand side by side, each but the last with a multiple
            of 32 rows, so that no block lies across two; or two of one shape if `gated`.
        gain: of the RMSNorm that x goes through first [K]; none when left out.
        eps: of that norm.
        gated: silu of the first product times the second.
        residual: added to the result [M, N].
        blocks: see `Blocks`; chosen by the sizes when left out.
    """
    rows, size = x.shape
    sizes = [len(weight) for weight in weights]
    outputs = sizes[0] if gated else sum(sizes)
    assert gated or (rows == 1 and all(count % 32 == 0 for count in sizes[:-1]))
    out = x.new_empty(rows, outputs)
    first, second, third = (*weights, weights[-1], weights[-1])[:3]
    # Ends of matrices that are not there lie beyond every row.
    ends = [sizes[0], sizes[0] + sizes[1]] if len(sizes) == 3 else [*sizes[:-1], outputs, outputs][:2]
    norm, add = gain is not None, residual is not None
    gain, residual = (x if tensor is None else tensor for tensor in (gain, residual))
    block_n, block_k, warps, stages = blocks or best_blocks(rows, size, outputs, gated, x.element_size())
    while not gated and any(count % block_n for count in sizes[:-1]):
        block_n //= 2
    if rows == 1:
        _one_row[(triton.cdiv(outputs, block_n),)](
            x, gain, first, second, third, residual, out, *ends, outputs, eps,
            SIZE=size, NORM=norm, GATED=gated, ADD=add, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
            **overlap.options(x),
        )  # fmt: skip
        return out
    block_m = height(rows)
    _few_rows[(triton.cdiv(outputs, block_n), triton.cdiv(rows, block_m))](
        x, gain, first, second, out, outputs, rows, eps,
        # fp32 means fp32, as in the plain form.
        SIZE=size, NORM=norm, PRECISION="ieee",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **overlap.options(x),
    )  # fmt: skip
    return out


def best_blocks(rows: int, size: int, outputs: int, gated: bool, width: int) -> Blocks:
    """The fastest known, or a guess: several programs for each multiprocessor, with some 4 to 10 KB of each in flight.

    Args:
        rows: M.
        size: K.
        outputs: N.
        gated: two matrices are read side by side.
        width: bytes of a number.
    """
    if (known := MEASURED.get((height(rows), size, outputs, gated))) is not None and width == 2:
        return known
    if rows == 1:
        along = max(64, min(1024 if outputs < 4096 else 512, triton.next_power_of_2(size)) * 2 // width)
        return (16 if outputs >= 65536 else 4), along, 4, 1
    # Long rows of few columns: what is in flight counts for more than how many programs there are.
    return 128, max(16, min(64, triton.next_power_of_2(size)) * 2 // width), 4, 4


def height(rows: int) -> int:
    """Rows of x that a program takes."""
    return 1 if rows == 1 else min(64, max(16, int(triton.next_power_of_2(rows))))


def few(rows: int, dtype: torch.dtype) -> bool:
    """Whether so many rows are worth these kernels rather than the library's product."""
    return rows <= (64 if dtype == torch.bfloat16 else 16)
