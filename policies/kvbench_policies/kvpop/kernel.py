"""Triton kernels: the mLSTM scorer's decode step in two launches.

The first multiplies the new and the leaving token of each row with the scorer's weights; the second updates the memory, reads
it for the leaving token and scores it. Plain form: `DelayedState`, with `mlstm.step` and `KvpopScorer.readout`. Sums and the
memory's arithmetic are fp32 as there, whatever number type stores it.

Shapes: R rows, H KV heads, D head dimension, O numbers that a token gives (z, -z, values, 1, gates; or z, -z, skip).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 32


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _given(  # type: ignore[no-untyped-def]
    new_key, new_value, old_key, old_value, weight, bias, out, rows,
    nk_row, nk_head, nv_row, nv_head, ok_row, ok_head, ov_row, ov_head, outputs,
    PRECISION: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Member 2 h of the batch is the new token of head h, member 2 h + 1 the leaving one.
    member = tl.program_id(0)
    head = member // 2
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PADDED)
    if member % 2 == 0:
        k_at = new_key + r[:, None] * nk_row + head * nk_head + d[None, :]
        v_at = new_value + r[:, None] * nv_row + head * nv_head + d[None, :]
    else:
        k_at = old_key + r[:, None] * ok_row + head * ok_head + d[None, :]
        v_at = old_value + r[:, None] * ov_row + head * ov_head + d[None, :]
    there = (r < rows)[:, None] & (d < DIM)[None, :]
    wide = (d < DIM)[:, None] & (n < outputs)[None, :]
    at = weight + (member * 2 * DIM + d)[:, None] * outputs + n[None, :]
    upper = tl.load(at, mask=wide, other=0.0).to(tl.float32)
    lower = tl.load(at + DIM * outputs, mask=wide, other=0.0).to(tl.float32)
    k = tl.load(k_at, mask=there, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=there, other=0.0).to(tl.float32)
    added = tl.load(bias + member * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    if BLOCK_M == 1:
        y = tl.sum(upper * tl.trans(k) + lower * tl.trans(v), 0)[None, :]
    else:
        y = tl.dot(k, upper, input_precision=PRECISION) + tl.dot(v, lower, input_precision=PRECISION)
    place = (r[:, None] * tl.num_programs(0) + member) * outputs + n[None, :]
    tl.store(out + place, y + added[None, :], mask=(r < rows)[:, None] & (n < outputs)[None, :])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _phi(given, FEATURES: tl.constexpr, PADDED: tl.constexpr, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Features [dphi] from z, and -z for signed features, at the start of what a token gives."""
    p = tl.arange(0, PADDED)
    z = tl.load(given + p, mask=p < FEATURES, other=float("-inf"))
    if SIGNED:
        first = p < FEATURES // 2
        one = tl.where(first, z, float("-inf"))
        two = tl.where(first, float("-inf"), z)
        one = tl.exp(one - tl.max(one, 0))
        two = tl.exp(two - tl.max(two, 0))
        return one / tl.sum(one, 0) + two / tl.sum(two, 0)
    z = tl.exp(z - tl.max(z, 0))
    return z / tl.sum(z, 0)


@triton.jit
def _log1p_exp(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)) for x <= 0; by its series where the logarithm's own rounding would show."""
    e = tl.exp(x)
    return tl.where(e < 0.03, e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * 0.25))), tl.log(1.0 + e))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _scored(  # type: ignore[no-untyped-def]
    given, cells, stabiliser, mix, final, log_gamma, positions, out, heads, outputs, floor, cap,
    FEATURES: tl.constexpr, FEATURES_PADDED: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
    HIDDEN: tl.constexpr, HIDDEN_PADDED: tl.constexpr,
    SIGNED: tl.constexpr, CAPPED: tl.constexpr, NORM: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    head = pair % heads
    written = given + 2 * pair * outputs
    wanted = written + outputs
    p = tl.arange(0, FEATURES_PADDED)
    u = tl.arange(0, WIDTH_PADDED)
    h = tl.arange(0, HIDDEN_PADDED)
    # Everything that comes from memory is asked for first.
    place = cells + pair * (WIDTH + 1) * FEATURES + u[:, None] * FEATURES + p[None, :]
    inside = (u < WIDTH)[:, None] & (p < FEATURES)[None, :]
    held = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    last = cells + (pair * (WIDTH + 1) + WIDTH) * FEATURES + p
    held_sum = tl.load(last, mask=p < FEATURES, other=0.0).to(tl.float32)
    mixing = tl.load(
        mix + (head * WIDTH + u)[:, None] * HIDDEN + h[None, :],
        mask=(u < WIDTH)[:, None] & (h < HIDDEN)[None, :],
        other=0.0,
    ).to(tl.float32)
    m = tl.load(stabiliser + pair)
    v = tl.load(written + FEATURES + u, mask=u < WIDTH, other=0.0)
    one = tl.load(written + FEATURES + WIDTH)
    i = tl.load(written + FEATURES + WIDTH + 1)
    f = tl.load(written + FEATURES + WIDTH + 2)
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
    k = _phi(written, FEATURES, FEATURES_PADDED, SIGNED)
    q = _phi(wanted, FEATURES, FEATURES_PADDED, SIGNED)
    held += share * (v[:, None] * k[None, :] - held)
    held_sum += share * (one * k - held_sum)
    y = tl.sum(held * q[None, :], 1)
    y = y / tl.maximum(tl.sum(held_sum * q, 0), tl.exp(floor - m))
    tl.debug_barrier()
    tl.store(place, held.to(cells.dtype.element_ty), mask=inside)
    tl.store(last, held_sum.to(cells.dtype.element_ty), mask=p < FEATURES)
    tl.store(stabiliser + pair, m)

    if NORM:
        mean = tl.sum(y, 0) / WIDTH
        centred = tl.where(u < WIDTH, y - mean, 0.0)
        y = centred / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + 1e-5)
    skip = tl.load(wanted + FEATURES + h, mask=h < HIDDEN, other=0.0)
    hidden = tl.sum(y[:, None] * mixing, 0) + skip
    hidden = hidden / (1.0 + tl.exp(-hidden))
    score = tl.sum(hidden * tl.load(final + head * HIDDEN + h, mask=h < HIDDEN, other=0.0).to(tl.float32), 0)
    if DECAYS:
        score -= tl.load(positions + pair // heads).to(tl.float32) * tl.load(log_gamma + head)
    tl.store(out + pair, score)


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
    """
    rows, heads, _, dim = new[0].shape
    width, features = cells.shape[2] - 1, cells.shape[3]
    hidden, outputs = mix.shape[2], weight.shape[2]
    given = torch.empty(rows, 2 * heads, outputs, dtype=torch.float32, device=cells.device)
    block_m = 1 if rows == 1 else max(16, min(64, triton.next_power_of_2(rows)))
    padded = max(16, triton.next_power_of_2(dim))
    pairs = (*new, *leaving)
    _given[(2 * heads, triton.cdiv(outputs, _BLOCK), triton.cdiv(rows, block_m))](
        *pairs, weight, bias, given, rows, *(step for tensor in pairs for step in tensor.stride()[:2]), outputs,
        # Three products of halves: fp32 but for the last bits, on matrix units.
        PRECISION="tf32x3", DIM=dim, DIM_PADDED=padded, BLOCK_M=block_m, BLOCK_N=_BLOCK, num_warps=4,
    )  # fmt: skip
    out = torch.empty(rows, heads, 1, dtype=torch.float32, device=cells.device)
    log_gamma, positions = decay or (out, out)
    _scored[(rows * heads,)](
        given, cells, m, mix, final, log_gamma, positions, out, heads, outputs, 0.5 * math.log(features), cap or bound,
        FEATURES=features, FEATURES_PADDED=triton.next_power_of_2(features),
        WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width),
        HIDDEN=hidden, HIDDEN_PADDED=triton.next_power_of_2(hidden),
        SIGNED=signed, CAPPED=cap > 0, NORM=norm, DECAYS=decay is not None,
        num_warps=8 if width * features >= 4096 else 4,
    )  # fmt: skip
    return out
