"""Triton kernels: attention of one query a row over its slots, the slots split among programs.

Flash-decoding (Dao et al. 2023): each program takes the query heads of one KV head and a share of the slots, so that keys and
values are read once, and leaves a running maximum, sum and output; a second kernel puts shares together. A row's share
follows from its own length on the device: rows of any length in one launch, and no empty slot is read. Where each head has a
length of its own, shares have one size, so that a long head has more of them. The plain forms are `over_slots` and
`with_weights` of `kvbench.engine.attention`.

Shapes: R rows, Hq query heads, H KV heads, G = Hq / H, B slots, D head dimension, S splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels import overlap
from kvbench.kernels.overlap import after_the_last
from kvbench.kernels.room import room

_LOG2E = 1.4426950408889634
_ENOUGH = 128
"""Rows and KV heads, together, from which each fills about a multiprocessor of a large GPU by itself."""
_PROGRAMS = 256
"""Programs that are wanted where there are fewer: about two for each multiprocessor."""
_SHARES = 128
"""Shares of a row and KV head at most, where heads have lengths of their own: so many are put together in registers."""


class Blocks(NamedTuple):
    """How slots are divided and read.

    Attributes:
        splits: shares of a row and KV head, a power of two.
        slots: read at a time.
        warps: of a program.
        stages: blocks of slots under way.
    """

    splits: int
    slots: int
    warps: int
    stages: int


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _size(length, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Slots of a share."""
    return tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _share(  # type: ignore[no-untyped-def]
    query, keys, values, lengths, at, out, top, total, logits, query_row, query_head, heads, capacity, factor,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, OWN: tl.constexpr, LOGITS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_the_last(OVERLAPS)
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = pair // heads
    if OWN:
        length = tl.load(lengths + pair)
        size = _size(capacity, SPLITS, BLOCK)
        # Shares beyond the length are no more looked at.
        if split * size >= length:
            return
    else:
        length = tl.minimum(tl.load(at + row) + 1, capacity).to(tl.int32)
        size = _size(length, SPLITS, BLOCK)
    begin = split * size
    end = tl.minimum(begin + size, length)
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, DIM_PADDED)
    grouped = (g < GROUP)[:, None] & (d < DIM)[None, :]
    keys += pair * capacity * DIM
    values += pair * capacity * DIM
    heads_before = (pair % heads) * GROUP
    q = tl.load(
        query + row * query_row + (heads_before + g)[:, None] * query_head + d[None, :], mask=grouped, other=0.0
    )
    best = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    for start in range(begin, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        live = n < end
        entry = n[:, None] * DIM + d[None, :]
        inside = live[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + entry, mask=inside, other=0.0)
        v = tl.load(values + entry, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
        scores = tl.where(live[None, :], scores, float("-inf"))
        if LOGITS:
            place = (pair * GROUP + g)[:, None] * capacity + n[None, :]
            tl.store(logits + place, scores, mask=(g < GROUP)[:, None] & live[None, :])
        higher = tl.maximum(best, tl.max(scores, 1))
        # Where nothing has been seen yet, the difference of two infinities would not be a number.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - level[:, None])
        fading = tl.exp2(best - level)
        weight = weight * fading + tl.sum(shares, 1)
        acc = acc * fading[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    if SPLITS == 1 and not LOGITS:
        done = acc / weight[:, None]
        tl.store(out + (pair * GROUP + g)[:, None] * DIM + d[None, :], done.to(out.dtype.element_ty), mask=grouped)
    else:
        part = (pair * GROUP + g) * SPLITS + split
        tl.store(out + part[:, None] * DIM + d[None, :], acc, mask=grouped)
        tl.store(top + part, best, mask=g < GROUP)
        tl.store(total + part, weight, mask=g < GROUP)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _together(  # type: ignore[no-untyped-def]
    parts, top, total, logits, lengths, at, out, weights, heads, capacity,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr, OWN: tl.constexpr,
    SHARE: tl.constexpr, LOGITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_the_last(OVERLAPS)
    head = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM_PADDED)
    if OWN:
        length = tl.load(lengths + head // GROUP)
        live = s * _size(capacity, SPLITS, SHARE) < length
    else:
        length = tl.minimum(tl.load(at + head // heads) + 1, capacity).to(tl.int32)
        live = s < SPLITS
    tops = tl.load(top + head * SPLITS + s, mask=live, other=float("-inf"))
    best = tl.max(tops, 0)
    fading = tl.exp2(tops - best)
    weight = tl.sum(tl.load(total + head * SPLITS + s, mask=live, other=0.0) * fading, 0)
    inside = live[:, None] & (d < DIM)[None, :]
    part = tl.load(parts + (head * SPLITS + s)[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    done = tl.sum(part * fading[:, None], 0) / weight
    tl.store(out + head * DIM + d, done.to(out.dtype.element_ty), mask=d < DIM)
    if LOGITS:
        for start in range(0, capacity, BLOCK):
            n = start + tl.arange(0, BLOCK)
            scores = tl.load(logits + head * capacity + n, mask=n < length, other=float("-inf"))
            tl.store(weights + head * capacity + n, tl.exp2(scores - best) / weight, mask=n < capacity)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    scale: float,
    lengths: Tensor | None = None,
    weighing: bool = False,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention [R, Hq, 1, D], and its weights [R, Hq, 1, B] in fp32 if `weighing`, zero on empty slots.

    Args:
        query: [R, Hq, 1, D], any strides but along D.
        keys, values: contiguous [R, H, B, D]; a row's first min(B, at + 1) slots count.
        at: position of each row's token [R], int64.
        scale: factor of the dot product.
        lengths: how many slots count in each head [R, H], int32, 1 or more, and not `at`.
        weighing: the weights are wanted.
        blocks: chosen by the sizes when left out.
    """
    rows, query_heads, _, dim = query.shape
    heads, capacity = keys.shape[1:3]
    group = query_heads // heads
    padded = triton.next_power_of_2(dim)
    own = lengths is not None
    blocks = blocks or best_blocks(rows * heads, capacity, dim, query.element_size(), query.device, own)
    splits = blocks.splits
    out = torch.empty(rows, query_heads, 1, dim, dtype=query.dtype, device=query.device)
    one = splits == 1 and not weighing

    def scratch(*shape: int) -> Tensor:
        return torch.empty(rows, query_heads, *shape, dtype=torch.float32, device=query.device)

    parts, top, total = (out, out, out) if one else (scratch(splits, dim), scratch(splits), scratch(splits))
    logits = scratch(1, capacity) if weighing else top
    _share[(rows * heads, splits)](
        query, keys, values, at if lengths is None else lengths, at, parts, top, total, logits,
        query.stride(0), query.stride(1), heads, capacity, scale * _LOG2E,
        GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)), DIM=dim, DIM_PADDED=max(16, padded),
        BLOCK=blocks.slots, SPLITS=splits, OWN=own, LOGITS=weighing, PRECISION="ieee",
        num_warps=blocks.warps, num_stages=blocks.stages, **overlap.options(query),
    )  # fmt: skip
    if one:
        return out, None
    # Written in place of the logits, which each program reads before.
    _together[(rows * query_heads,)](
        parts, top, total, logits, at if lengths is None else lengths, at, out, logits, query_heads, capacity,
        GROUP=group, DIM=dim, DIM_PADDED=padded, SPLITS=splits, OWN=own, SHARE=blocks.slots, LOGITS=weighing,
        BLOCK=1024, num_warps=4 if splits * padded <= 16384 else 8, **overlap.options(query),
    )  # fmt: skip
    return out, logits if weighing else None


def best_blocks(pairs: int, capacity: int, dim: int, width: int, device: torch.device, own: bool = False) -> Blocks:
    """The fastest of those that were tried on an H200, with 4096 slots or a mean of 1024 to 31372 in heads of their own length.

    Args:
        pairs: rows times KV heads.
        capacity: slots of each.
        dim: numbers of a key.
        width: bytes of a number.
        device: that computes it.
        own: each head has a length of its own, of which only the greatest is known, `capacity`.
    """
    many = pairs >= _ENOUGH
    # Of such keys and values three blocks can be under way, of 64 slots on any device.
    small = width == 2 and dim <= 128
    large_blocks = small and capacity >= 1024 and room(device) >= 160 * 1024
    if own:
        splits = min(_SHARES, int(triton.next_power_of_2(max(1, capacity // (512 if many else 256)))))
        # Where there are several programs for each multiprocessor, small ones share it better.
        if large_blocks and not many and capacity <= 256 * _SHARES:
            return Blocks(splits, 128, 8, 3)
        return Blocks(splits, 64 if width == 2 else 32, 4, 3 if small else 2)
    if many and large_blocks:
        return Blocks(1, 128, 8, 3)
    wanted = int(triton.next_power_of_2(triton.cdiv(_PROGRAMS, pairs)))
    # Each has at least two blocks.
    splits = max(1, min(64, wanted, int(triton.next_power_of_2(capacity)) // 128))
    return Blocks(splits, 64 if width == 2 else 32, 4, 2)
