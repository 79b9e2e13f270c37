"""Triton kernels: products of a few rows with weight matrices, where reading the weights is all that counts.

    y = norm(x) W^T            norm: RMSNorm with a gain, or nothing; W one matrix, or up to three one below the other
    y = silu(x G^T) * (x U^T)  the same with a pair of matrices, as in a gated MLP
    y = r + x W^T              with a residual

Each program owns some rows of W and walks along them once. Sums are kept in fp32.

One row of x is multiplied element by element. Its norm costs no pass of its own: x times the gain goes into the product, the
sum of squares is taken along the way, and the result is scaled at the end. Several rows go through matrix instructions and are
normed before. Where W has few rows, several programs share each of them; their sums are put together with residual and norm
(`kvbench/kernels/settle.py`). Plain forms: `RMSNorm`, `linear` and the gated MLP of the model itself.

Shapes: M rows of x, K inputs, N outputs, S shares of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels import overlap
from kvbench.kernels.overlap import after_the_last
from kvbench.kernels.room import room


class Blocks(NamedTuple):
    """How a product is divided among programs.

    Attributes:
        outputs: rows of W in a program.
        inputs: numbers along K at a time.
        warps: of a program.
        stages: tiles under way, of several rows of x.
        shares: programs that share a row of W, where the caller puts sums together.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int
    shares: int = 1


MEASURED: dict[tuple[int, int, int, bool], Blocks] = {
    (1, 2560, 6144, False): Blocks(4, 256, 2, 1),
    (1, 4096, 2560, False): Blocks(1, 2048, 4, 1),
    (1, 2560, 9728, True): Blocks(4, 256, 4, 1),
    (1, 9728, 2560, False): Blocks(2, 1024, 4, 1),
    (1, 2560, 151936, False): Blocks(4, 256, 2, 1),
    (16, 2560, 6144, False): Blocks(64, 128, 4, 6),
    (16, 4096, 2560, False): Blocks(64, 64, 4, 6, 4),
    (16, 2560, 9728, True): Blocks(64, 64, 4, 4),
    (16, 9728, 2560, False): Blocks(32, 128, 4, 4, 4),
    (16, 2560, 151936, False): Blocks(64, 128, 4, 4),
    (64, 2560, 6144, False): Blocks(64, 128, 4, 4),
    (64, 4096, 2560, False): Blocks(64, 128, 4, 4, 2),
    (64, 2560, 9728, True): Blocks(64, 64, 4, 4),
    (64, 9728, 2560, False): Blocks(64, 64, 4, 6, 4),
    (64, 2560, 151936, False): Blocks(64, 64, 4, 5),
}
"""Fastest blocks in bf16 by rows of x in a program, K, N and gate: `python -m benchmarks.decode --only tune` on an H200."""


@triton.jit
def _rounded(y, like):  # type: ignore[no-untyped-def]
    """To the number type of the model and back, as between two of its operations."""
    return y.to(like.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _place(start, n, first, second, third, first_end, second_end, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The matrix that a block of outputs n from `start` on belongs to, and its rows there; no block lies across two."""
    weight = first
    row = n
    if not GATED:
        if start >= second_end:
            weight = third
            row = n - second_end
        elif start >= first_end:
            weight = second
            row = n - first_end
    return weight, row


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
    weight, row = _place(start, n, first, second, third, first_end, second_end, GATED)
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
    x, first, second, third, out, first_end, second_end, outputs, rows, share,
    SIZE: tl.constexpr, GATED: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_the_last(OVERLAPS)
    start = tl.program_id(0) * BLOCK_N
    n = start + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    weight, row = _place(start, n, first, second, third, first_end, second_end, GATED)
    k = tl.arange(0, BLOCK_K)
    at = row.to(tl.int64)[:, None] * SIZE + k[None, :]
    given = m[None, :] * SIZE + k[:, None]
    inside, there = (n < outputs)[:, None], (m < rows)[None, :]
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, SIZE)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for place in range(begin, end, BLOCK_K):
        here = place + k < end
        value = tl.load(x + given + place, mask=here[:, None] & there, other=0.0)
        tile = tl.load(weight + at + place, mask=here[None, :] & inside, other=0.0)
        acc = tl.dot(tile, value, acc, input_precision=PRECISION)
        if GATED:
            pair = tl.load(second + at + place, mask=here[None, :] & inside, other=0.0)
            ups = tl.dot(pair, value, ups, input_precision=PRECISION)
    mask = inside & there
    to = m[None, :].to(tl.int64) * outputs + n[:, None]
    if SHARED:
        tl.store(out + tl.program_id(2).to(tl.int64) * rows * outputs + to, acc, mask=mask)
    else:
        _finished(acc, ups, 0.0, x, out, to, mask, SIZE, 0.0, NORM=False, GATED=GATED, ADD=False)


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
    """Products [M, N] of rows x [M, K], in its number type.

    Args:
        x: contiguous.
        weights: one to three contiguous matrices [N_i, K], whose results stand side by side, each but the last with a multiple
            of 32 rows, so that no block lies across two; or two of one shape if `gated`.
        gain: of the RMSNorm that a single x goes through first [K]; none when left out.
        eps: of that norm.
        gated: silu of the first product times the second.
        residual: added to the result of a single x [M, N].
        blocks: see `Blocks`; chosen by the sizes when left out.
    """
    rows, size = x.shape
    sizes = [len(weight) for weight in weights]
    outputs = sizes[0] if gated else sum(sizes)
    assert gated or all(count % 32 == 0 for count in sizes[:-1])
    first, second, third = (*weights, weights[-1], weights[-1])[:3]
    # Ends of matrices that are not there lie beyond every row.
    ends = [sizes[0], sizes[0] + sizes[1]] if len(sizes) == 3 else [*sizes[:-1], outputs, outputs][:2]
    blocks = blocks or best_blocks(rows, size, outputs, gated, x.element_size(), room(x.device))
    while not gated and any(count % blocks.outputs for count in sizes[:-1]):
        blocks = blocks._replace(outputs=blocks.outputs // 2)
    out = x.new_empty(rows, outputs)
    if rows > 1:
        assert (gain, residual) == (None, None)
        return _of_few(x, (first, second, third), out, ends, blocks, gated=gated, shared=False)
    norm, add = gain is not None, residual is not None
    gain, residual = (x if tensor is None else tensor for tensor in (gain, residual))
    _one_row[(triton.cdiv(outputs, blocks.outputs),)](
        x, gain, first, second, third, residual, out, *ends, outputs, eps,
        SIZE=size, NORM=norm, GATED=gated, ADD=add, BLOCK_N=blocks.outputs, BLOCK_K=blocks.inputs, num_warps=blocks.warps,
        **overlap.options(x),
    )  # fmt: skip
    return out


def shares(x: Tensor, weight: Tensor, blocks: Blocks | None = None) -> Tensor:
    """Shares [S, M, N] of the product of several rows x [M, K] and a matrix [N, K], in fp32: their sum is the product."""
    blocks = blocks or best_blocks(len(x), x.shape[1], len(weight), False, x.element_size(), room(x.device))
    along = triton.cdiv(x.shape[1], blocks.shares * blocks.inputs) * blocks.inputs
    out = x.new_empty(triton.cdiv(x.shape[1], along), len(x), len(weight), dtype=torch.float32)
    return _of_few(x, (weight,) * 3, out, [len(weight)] * 2, blocks, gated=False, shared=True)


def _of_few(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    ends: list[int],
    blocks: Blocks,
    *,
    gated: bool,
    shared: bool,
) -> Tensor:
    rows, size = x.shape
    count = len(out) if shared else 1
    block_m, outputs = height(rows), out.shape[-1]
    _few_rows[(triton.cdiv(outputs, blocks.outputs), triton.cdiv(rows, block_m), count)](
        x, *weights, out, *ends, outputs, rows, triton.cdiv(size, count * blocks.inputs) * blocks.inputs,
        # fp32 means fp32, as in the plain form.
        SIZE=size, GATED=gated, SHARED=shared, PRECISION="ieee", BLOCK_M=block_m, BLOCK_N=blocks.outputs, BLOCK_K=blocks.inputs,
        num_warps=blocks.warps, num_stages=blocks.stages, **overlap.options(x),
    )  # fmt: skip
    return out


def best_blocks(rows: int, size: int, outputs: int, gated: bool, width: int, room: int) -> Blocks:
    """The fastest known, or a guess: several programs for each multiprocessor, with some 4 to 10 KB of each in flight.

    Args:
        rows: M.
        size: K.
        outputs: N.
        gated: two matrices are read side by side.
        width: bytes of a number.
        room: bytes that a program may hold of several rows' tiles.
    """
    known = MEASURED.get((height(rows), size, outputs, gated)) if width == 2 else None
    if rows == 1:
        along = max(64, min(1024 if outputs < 4096 else 512, triton.next_power_of_2(size)) * 2 // width)
        return known or Blocks(16 if outputs >= 65536 else 4, along, 4, 1)
    along = max(16, min(64 if gated else 128, triton.next_power_of_2(size)) * 2 // width)
    across = 128 if outputs >= 65536 else 64 if gated else 32
    blocks = known or Blocks(across, along, 4, 4, max(1, min(8, 6144 // outputs, size // 512)))
    tile = blocks.inputs * (blocks.outputs * (2 if gated else 1) + height(rows)) * width
    return blocks._replace(stages=max(1, min(blocks.stages, room // tile)))


def height(rows: int) -> int:
    """Rows of x that a program takes."""
    return 1 if rows == 1 else min(64, max(16, int(triton.next_power_of_2(rows))))


def few(rows: int, dtype: torch.dtype) -> bool:
    """Whether so many rows are worth these kernels rather than the library's product."""
    return rows <= (64 if dtype == torch.bfloat16 else 16)
