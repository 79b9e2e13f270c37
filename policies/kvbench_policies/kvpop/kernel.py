"""Triton kernels: the mLSTM scorer's decode step in two or three launches.

1. `_given` multiplies the new and the leaving token of each row with the scorer's weights.
2. `_memory` updates the memory and reads it for the leaving token; a program has one head of one row, or some of its values.
3. `_readout` scores what was read, for a block of rows that share the mixing weights. For one or two rows `_memory` does that
   too, which saves the launch.

A launch begins while the one before it ends, with what does not depend on that (`kvbench/kernels/overlap.py`). Plain form:
`DelayedState`, with `mlstm.step` and `KvpopScorer.readout`. Sums and the memory's arithmetic are fp32 as there, whatever number
type stores it.

Shapes: R rows, H KV heads, D head dimension, O numbers that a token gives (z, values, 1, gates; or z, skip). Signed features
come from z and -z: there z has half as many numbers as there are features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels import overlap
from kvbench.kernels.overlap import after_the_last


class Blocks(NamedTuple):
    """How the launches are divided; each number but `values` a power of 2.

    Attributes:
        tokens: rows that a program of `_given` takes: 1, or 16 and more.
        outputs: of O, in one program.
        inputs: of D at a time.
        given_warps: of `_given`.
        values: of dv, that a program of `_memory` takes; 0 for all of them and the readout.
        memory_warps: of `_memory`.
        hidden: numbers of `_readout` at a time.
        readout_warps: of `_readout`.
    """

    tokens: int
    outputs: int
    inputs: int
    given_warps: int
    values: int
    memory_warps: int
    hidden: int
    readout_warps: int


MEASURED: dict[tuple[int, int, int, int], Blocks] = {
    (1, 128, 128, 128): Blocks(1, 16, 128, 4, 0, 8, 64, 8),
    (16, 128, 128, 128): Blocks(16, 32, 32, 4, 16, 1, 128, 8),
    (64, 128, 128, 128): Blocks(64, 16, 32, 4, 32, 1, 128, 8),
}
"""Fastest blocks by `height` of rows, dv, features and hidden: `python -m benchmarks.decode --only tune` on an H200."""

_ROWS = 16
"""Rows that a program of `_readout` takes: the fewest that matrix units take."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _given(  # type: ignore[no-untyped-def]
    new_key, new_value, old_key, old_value, weight, bias, out, rows,
    nk_row, nk_head, nv_row, nv_head, ok_row, ok_head, ov_row, ov_head, outputs,
    PRECISION: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_the_last(OVERLAPS)
    # Member 2 h of the batch is the new token of head h, member 2 h + 1 the leaving one.
    member = tl.program_id(0)
    head = member // 2
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    if member % 2 == 0:
        key, value, key_row, value_row = new_key + head * nk_head, new_value + head * nv_head, nk_row, nv_row
    else:
        key, value, key_row, value_row = old_key + head * ok_head, old_value + head * ov_head, ok_row, ov_row
    at = weight + (member * 2 * DIM + d)[:, None] * outputs + n[None, :]
    added = tl.load(bias + member * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, DIM, BLOCK_D):
        here = start + d < DIM
        wide = here[:, None] & (n < outputs)[None, :]
        upper = tl.load(at + start * outputs, mask=wide, other=0.0).to(tl.float32)
        lower = tl.load(at + (start + DIM) * outputs, mask=wide, other=0.0).to(tl.float32)
        if BLOCK_M == 1:
            k = tl.load(key + tl.program_id(2) * key_row + start + d, mask=here, other=0.0).to(tl.float32)
            v = tl.load(value + tl.program_id(2) * value_row + start + d, mask=here, other=0.0).to(tl.float32)
            y += tl.sum(upper * k[:, None] + lower * v[:, None], 0)[None, :]
        else:
            there = (r < rows)[:, None] & here[None, :]
            k = tl.load(key + r[:, None] * key_row + start + d[None, :], mask=there, other=0.0).to(tl.float32)
            v = tl.load(value + r[:, None] * value_row + start + d[None, :], mask=there, other=0.0).to(tl.float32)
            y = tl.dot(k, upper, y, input_precision=PRECISION)
            y = tl.dot(v, lower, y, input_precision=PRECISION)
    place = (r[:, None] * tl.num_programs(0) + member) * outputs + n[None, :]
    tl.store(out + place, y + added[None, :], mask=(r < rows)[:, None] & (n < outputs)[None, :])


@triton.jit
def _highest(a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    return tl.maximum(a, e), tl.maximum(b, f), tl.maximum(c, g), tl.maximum(d, h)


@triton.jit
def _summed(a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    return a + e, b + f, c + g, d + h


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _phi(written, wanted, p, Z: tl.constexpr, Z_PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax of z in the first Z_PADDED places p, of -z in those behind; of two tokens that give z first.

    The four maxima are found together, and the four sums: each pass has all warps of a program wait for one another.
    """
    real, first = p % Z_PADDED < Z, p < Z_PADDED
    k = tl.load(written + p % Z_PADDED, mask=real, other=0.0)
    q = tl.load(wanted + p % Z_PADDED, mask=real, other=0.0)
    none = float("-inf")
    k = tl.where(real, tl.where(first, k, -k), none)
    q = tl.where(real, tl.where(first, q, -q), none)
    parts = (tl.where(first, k, none), tl.where(first, none, k), tl.where(first, q, none), tl.where(first, none, q))
    one, two, three, four = tl.reduce(parts, 0, _highest)
    k = tl.exp(k - tl.where(first, one, two))
    q = tl.exp(q - tl.where(first, three, four))
    parts = (tl.where(first, k, 0.0), tl.where(first, 0.0, k), tl.where(first, q, 0.0), tl.where(first, 0.0, q))
    one, two, three, four = tl.reduce(parts, 0, _summed)
    return k / tl.where(first, one, two), q / tl.where(first, three, four)


@triton.jit
def _log1p_exp(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)) for x <= 0; by its series where the logarithm's own rounding would show."""
    e = tl.exp(x)
    return tl.where(e < 0.03, e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * 0.25))), tl.log(1.0 + e))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _normed(y, u, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Layer norm without weights of rows [M, U], of which places u < WIDTH count."""
    mean = tl.sum(y, 1) / WIDTH
    centred = tl.where((u < WIDTH)[None, :], y - mean[:, None], 0.0)
    return centred / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + 1e-5)[:, None]


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _memory(  # type: ignore[no-untyped-def]
    given, cells, stabiliser, mix, final, log_gamma, positions, read, out, heads, outputs, room, floor, cap,
    Z: tl.constexpr, Z_PADDED: tl.constexpr, SIDES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_U: tl.constexpr,
    HIDDEN: tl.constexpr, HIDDEN_PADDED: tl.constexpr,
    CAPPED: tl.constexpr, NORM: tl.constexpr, DECAYS: tl.constexpr, WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    head = pair % heads
    written = given + 2 * pair * outputs
    wanted = written + outputs
    # Both sides of z are padded for themselves.
    p = tl.arange(0, SIDES * Z_PADDED)
    column = p // Z_PADDED * Z + p % Z_PADDED
    real = p % Z_PADDED < Z
    u = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    h = tl.arange(0, HIDDEN_PADDED)
    # What the launch before does not write is asked for first; those before that one have finished.
    cells += pair * (WIDTH + 1) * SIDES * Z
    place = cells + u[:, None] * (SIDES * Z) + column[None, :]
    inside = (u < WIDTH)[:, None] & real[None, :]
    held = tl.load(place, mask=inside, other=0.0)
    last = cells + WIDTH * SIDES * Z + column
    held_sum = tl.load(last, mask=real, other=0.0).to(tl.float32)
    m = tl.load(stabiliser + pair)
    if WHOLE:
        mixing = tl.load(
            mix + (head * WIDTH + u)[:, None] * HIDDEN + h[None, :],
            mask=(u < WIDTH)[:, None] & (h < HIDDEN)[None, :],
            other=0.0,
        ).to(tl.float32)
        ending = tl.load(final + head * HIDDEN + h, mask=h < HIDDEN, other=0.0).to(tl.float32)
    after_the_last(OVERLAPS)
    v = tl.load(written + Z + u, mask=u < WIDTH, other=0.0)
    one = tl.load(written + Z + WIDTH)
    i = tl.load(written + Z + WIDTH + 1)
    f = tl.load(written + Z + WIDTH + 2)
    if WHOLE:
        skip = tl.load(wanted + Z + h, mask=h < HIDDEN, other=0.0)
    if CAPPED:
        # tanh from exponentials that cannot overflow.
        i = cap * (2.0 / (1.0 + tl.exp(-2.0 * i)) - 1.0)
        f = cap * (2.0 / (1.0 + tl.exp(-2.0 * f)) - 1.0)
    else:
        i = tl.minimum(tl.maximum(i, -cap), cap)
        f = tl.minimum(tl.maximum(f, -cap), cap)

    carried = tl.minimum(f, 0.0) - _log1p_exp(-tl.abs(f)) + m
    share = 1.0 / (1.0 + tl.exp(carried - i))
    m = tl.maximum(carried, i) + _log1p_exp(-tl.abs(carried - i))
    k, q = _phi(written, wanted, p, Z, Z_PADDED)
    cell = held.to(tl.float32)
    cell += share * (v[:, None] * k[None, :] - cell)
    # Several threads may hold a number: all have to have read it before one writes.
    tl.debug_barrier()
    tl.store(place, cell.to(cells.dtype.element_ty), mask=inside)
    y = tl.sum(cell * q[None, :], 1)
    held_sum += share * (one * k - held_sum)
    divisor = tl.maximum(tl.sum(held_sum * q, 0), tl.exp(floor - m))
    if WHOLE:
        tl.store(last, held_sum.to(cells.dtype.element_ty), mask=real)
        tl.store(stabiliser + pair, m)
        y = (y / divisor)[None, :]
        if NORM:
            y = _normed(y, u, WIDTH)
        hidden = _silu(tl.sum(tl.trans(y) * mixing, 0) + skip)
        score = tl.sum(hidden * ending, 0)
        if DECAYS:
            score -= tl.load(positions + pair // heads).to(tl.float32) * tl.load(log_gamma + head)
        tl.store(out + pair, score)
    else:
        tl.store(read + pair * room + u, y, mask=u < WIDTH)
        if tl.program_id(1) == 0:
            tl.store(last, held_sum.to(cells.dtype.element_ty), mask=real)
            tl.store(read + pair * room + WIDTH, divisor)
            # `_readout` puts it in its place, since other programs of this launch may still have to read the old one.
            tl.store(read + pair * room + WIDTH + 1, m)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _readout(  # type: ignore[no-untyped-def]
    given, stabiliser, mix, final, log_gamma, positions, read, out, rows, heads, outputs, room,
    PRECISION: tl.constexpr, Z: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr, DECAYS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    r = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = r < rows
    pair = r.to(tl.int64) * heads + head
    u = tl.arange(0, WIDTH_PADDED)
    h = tl.arange(0, BLOCK_H)
    at = mix + (head * WIDTH + u)[:, None] * HIDDEN + h[None, :]
    tile = tl.load(at, mask=(u < WIDTH)[:, None] & (h < HIDDEN)[None, :], other=0.0).to(tl.float32)
    after_the_last(OVERLAPS)
    held = read + pair * room
    y = tl.load(held[:, None] + u[None, :], mask=live[:, None] & (u < WIDTH)[None, :], other=0.0)
    y = y / tl.load(held + WIDTH, mask=live, other=1.0)[:, None]
    tl.store(stabiliser + pair, tl.load(held + WIDTH + 1, mask=live), mask=live)
    if NORM:
        y = _normed(y, u, WIDTH)
    score = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        here = start + h < HIDDEN
        later = (start + BLOCK_H + h < HIDDEN)[None, :] & (u < WIDTH)[:, None]
        following = tl.load(at + start + BLOCK_H, mask=later, other=0.0).to(tl.float32)
        skip_at = given + (2 * pair + 1)[:, None] * outputs + Z + start + h[None, :]
        skip = tl.load(skip_at, mask=live[:, None] & here[None, :], other=0.0)
        ending = tl.load(final + head * HIDDEN + start + h, mask=here, other=0.0).to(tl.float32)
        score += tl.sum(_silu(tl.dot(y, tile, skip, input_precision=PRECISION)) * ending[None, :], 1)
        tile = following
    if DECAYS:
        score -= tl.load(positions + r, mask=live, other=0).to(tl.float32) * tl.load(log_gamma + head)
    tl.store(out + pair, score, mask=live)


def write_and_read(
    new: tuple[Tensor, Tensor],
    leaving: tuple[Tensor, Tensor],
    weight: Tensor,
    bias: Tensor,
    cells: Tensor,
    m: Tensor,
    mix: Tensor,
    final: Tensor,
    decay: tuple[Tensor, Tensor] | None,
    *,
    cap: float,
    bound: float,
    signed: bool,
    norm: bool,
    blocks: Blocks | None = None,
) -> Tensor:
    """Writes a token into the memory, in place, and returns the score [R, H, 1] of another in fp32.

    Args:
        new: key and value of the written token [R, H, 1, D].
        leaving: of the scored token.
        weight: [2 H, 2 D, O], head by head for the written and the scored token.
        bias: [2 H, 1, O].
        cells: [R, H, dv + 1, dphi].
        m: [R, H].
        mix: [H, dv, hidden].
        final: [H, hidden, 1].
        decay: log gamma [H] and positions [R, 1] of the scored tokens; None without.
        cap: soft bound of the gates; 0 for none.
        bound: hard bound of gates without a soft one.
        signed: features are a softmax of z and one of -z.
        norm: normalise what is read.
        blocks: see `Blocks`; chosen by the sizes when left out.
    """
    rows, heads, _, dim = new[0].shape
    width, features = cells.shape[2] - 1, cells.shape[3]
    hidden, outputs = mix.shape[2], weight.shape[2]
    blocks = blocks or best_blocks(rows, width, features, hidden)
    after = overlap.options(cells)
    given = torch.empty(rows, 2 * heads, outputs, dtype=torch.float32, device=cells.device)
    out = torch.empty(rows, heads, 1, dtype=torch.float32, device=cells.device)
    pairs = (*new, *leaving)
    _given[(2 * heads, triton.cdiv(outputs, blocks.outputs), triton.cdiv(rows, blocks.tokens))](
        *pairs, weight, bias, given, rows, *(step for tensor in pairs for step in tensor.stride()[:2]), outputs,
        # Three products of halves: fp32 but for the last bits, on matrix units.
        PRECISION="tf32x3", DIM=dim, BLOCK_M=blocks.tokens, BLOCK_N=blocks.outputs,
        BLOCK_D=max(16, min(blocks.inputs, triton.next_power_of_2(dim))),
        num_warps=blocks.given_warps, num_stages=4, **after,
    )  # fmt: skip
    # What is read, what it is divided by, and m; in whole vectors.
    room = triton.cdiv(width + 2, 16) * 16
    whole = blocks.values == 0
    read = out if whole else torch.empty(rows, heads, room, dtype=torch.float32, device=cells.device)
    log_gamma, positions = decay or (out, out)
    z, padded = features // 2 if signed else features, triton.next_power_of_2(width)
    block_u = min(blocks.values or padded, padded)
    _memory[(rows * heads, triton.cdiv(width, block_u))](
        given, cells, m, mix, final, log_gamma, positions, read, out, heads, outputs, room,
        0.5 * math.log(features), cap or bound,
        Z=z, Z_PADDED=triton.next_power_of_2(z), SIDES=2 if signed else 1, WIDTH=width, BLOCK_U=block_u,
        HIDDEN=hidden, HIDDEN_PADDED=triton.next_power_of_2(hidden),
        CAPPED=cap > 0, NORM=norm, DECAYS=decay is not None, WHOLE=whole,
        num_warps=blocks.memory_warps, **after,
    )  # fmt: skip
    if not whole:
        _readout[(heads, triton.cdiv(rows, _ROWS))](
            given, m, mix, final, log_gamma, positions, read, out, rows, heads, outputs, room,
            PRECISION="tf32x3", Z=z, WIDTH=width, WIDTH_PADDED=max(16, padded), HIDDEN=hidden,
            BLOCK_M=_ROWS, BLOCK_H=max(16, min(blocks.hidden, triton.next_power_of_2(hidden))),
            NORM=norm, DECAYS=decay is not None, num_warps=blocks.readout_warps, num_stages=1, **after,
        )  # fmt: skip
    return out


def best_blocks(rows: int, width: int, features: int, hidden: int) -> Blocks:
    """The fastest known, or a guess.

    Args:
        rows: R.
        width: dv.
        features: dphi.
        hidden: of the readout.
    """
    if known := MEASURED.get((height(rows), width, features, hidden)):
        return known
    # Two rows or fewer are done sooner than another launch begins; more share the mixing weights.
    whole = rows <= 2 and width * features <= 16384
    warps = 16 if width * features >= 16384 else 8 if width * features >= 4096 else 4
    return Blocks(
        tokens=1 if rows == 1 else max(16, height(rows)),
        outputs=32 if rows > 16 else 16,
        inputs=128 if rows == 1 else 32,
        given_warps=4,
        # One warp has nobody to wait for; it holds 64 numbers a thread.
        values=0 if whole else max(1, 2048 // int(triton.next_power_of_2(features))),
        memory_warps=warps if whole else 1,
        hidden=max(16, 8192 // int(triton.next_power_of_2(width))),
        readout_warps=8,
    )


def height(rows: int) -> int:
    """Rows, up to the next power of 2 and at most 64: the same blocks for all of them."""
    return min(64, int(triton.next_power_of_2(rows)))
