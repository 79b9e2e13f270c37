"""Triton kernels: one token a row enters the slots of a layer, in all rows and KV heads at once.

`leaving` hands out the token that leaves the window; `enter` gives it its priority, chooses the victim and overwrites it;
`rank` stores the priorities of a policy that observes. What depends on how many tokens a row has seen is decided on the device,
row by row. The plain forms are `Layer.decode` with `victims`, and `Slots.set_priority`; their rules hold here to the bit: the
victim has the lowest priority, on a tie the lowest position.

Shapes: R rows, H KV heads, B slots, D head dimension, w window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.core.policy import Tokens
from kvbench.core.slots import Slots
from kvbench.kernels import overlap
from kvbench.kernels.overlap import after_the_last

_SLOTS = 4096
"""Slots that a program looks at together, at most."""
_SAMPLES = 512
"""Of these it looks at first to see how many are held, then at those between two."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def take_leaving(  # type: ignore[no-untyped-def]
    pair, keys, values, recent, at, out_keys, out_values, out_at, heads, capacity, window,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Copies the token that leaves in one row and head, `pair` = row * heads + head."""
    row = pair // heads
    position = tl.load(at + row)
    slot = tl.load(recent + pair * window + position % window)
    d = tl.arange(0, DIM_PADDED)
    source = (pair * capacity + slot) * DIM + d
    tl.store(out_keys + pair * DIM + d, tl.load(keys + source, mask=d < DIM), mask=d < DIM)
    tl.store(out_values + pair * DIM + d, tl.load(values + source, mask=d < DIM), mask=d < DIM)
    # Every head of a row writes the same number.
    tl.store(out_at + row, position - window)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _leaving(  # type: ignore[no-untyped-def]
    keys, values, recent, at, out_keys, out_values, out_at, heads, capacity, window,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_the_last(OVERLAPS)
    take_leaving(
        tl.program_id(0).to(tl.int64), keys, values, recent, at, out_keys, out_values, out_at,
        heads, capacity, window, DIM, DIM_PADDED,
    )  # fmt: skip


@triton.jit
def _unprotected(given):  # type: ignore[no-untyped-def]
    """As the function of this name in `kvbench.core.slots`."""
    given = given.to(tl.float32)
    return tl.where(given != given, float("-inf"), tl.minimum(given, 3.4028234663852886e38))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _held(positions, capacity, SAMPLES: tl.constexpr, APART: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many slots are held, which are the first ones: among some at even distances, then after the last held of these."""
    n = tl.arange(0, SAMPLES) * APART
    start = (tl.sum((tl.load(positions + n, mask=n < capacity, other=-1) >= 0).to(tl.int32), 0) - 1) * APART
    n = start + tl.arange(0, APART)
    held = tl.load(positions + n, mask=(n >= 0) & (n < capacity), other=-1) >= 0
    return tl.maximum(start, 0) + tl.sum(held.to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _enter(  # type: ignore[no-untyped-def]
    keys, values, positions, priority, recent, key, value, at, ranked, lengths,
    key_row, key_head, value_row, value_head, ranked_row, ranked_head,
    heads, capacity, window, sinks,
    RANKED: tl.constexpr, FREES: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLES: tl.constexpr, APART: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_the_last(OVERLAPS)
    LATEST: tl.constexpr = 2147483647
    pair = tl.program_id(0).to(tl.int64)
    row = pair // heads
    head = pair % heads
    position = tl.load(at + row)
    recent += pair * window + position % window
    positions += pair * capacity
    priority += pair * capacity
    old = tl.load(recent)
    rank = 0.0
    if RANKED:
        given = _unprotected(tl.load(ranked + row * ranked_row + head * ranked_head))
        # Sinks stay protected; before the window is full nothing leaves it.
        rank = tl.where(position - window >= sinks, given, tl.load(priority + old))

    # Token p of a row that is not full takes slot p; a full row's victim is searched for.
    slot = position
    full = position >= capacity
    count = 0
    if FREES:
        count = _held(positions, capacity, SAMPLES, APART)
        # The token that leaves is dropped, and its slot is taken; or a row that has ended feeds its last token again.
        reused = (rank == float("-inf")) | (tl.load(positions + old) == position)
        full = (count >= capacity) & (reused == 0)
        slot = tl.where(reused, old, count)
    lowest = float("inf")
    oldest = LATEST
    found = 0
    for start in range(0, tl.where(full, capacity, 0), BLOCK):
        n = start + tl.arange(0, BLOCK)
        live = n < capacity
        ranks = tl.load(priority + n, mask=live, other=float("inf"))
        ages = tl.load(positions + n, mask=live, other=LATEST)
        if RANKED:
            ranks = tl.where(n == old, rank, ranks)
        least = tl.min(ranks, 0)
        first = tl.min(tl.where(ranks == least, ages, LATEST), 0)
        place = tl.min(tl.where((ranks == least) & (ages == first), n, LATEST), 0)
        better = (least < lowest) | ((least == lowest) & (first < oldest))
        found = tl.where(better, place, found)
        oldest = tl.where(better, first, oldest)
        lowest = tl.where(better, least, lowest)
    slot = tl.where(full, found, slot)
    if FREES:
        tl.store(lengths + pair, tl.maximum(count, slot.to(tl.int32) + 1))

    d = tl.arange(0, DIM_PADDED)
    new_key = tl.load(key + row * key_row + head * key_head + d, mask=d < DIM)
    new_value = tl.load(value + row * value_row + head * value_head + d, mask=d < DIM)
    tl.debug_barrier()
    target = (pair * capacity + slot) * DIM + d
    tl.store(keys + target, new_key, mask=d < DIM)
    tl.store(values + target, new_value, mask=d < DIM)
    if RANKED:
        tl.store(priority + old, tl.where(old == slot, float("inf"), rank))
    tl.store(priority + slot, float("inf"))
    tl.store(positions + slot, position.to(tl.int32))
    tl.store(recent, slot)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _rank(  # type: ignore[no-untyped-def]
    priority, positions, given, at, given_row, given_head, heads, capacity, extent, window, sinks,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_the_last(OVERLAPS)
    pair = tl.program_id(0).to(tl.int64)
    row = pair // heads
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = n < extent
    held = tl.load(positions + pair * capacity + n, mask=live, other=-1)
    wanted = _unprotected(tl.load(given + row * given_row + (pair % heads) * given_head + n, mask=live, other=0.0))
    # The window of the next token, before which the next victim is chosen.
    protected = (held < sinks) | (held > tl.load(at + row) + 1 - window)
    ranked = tl.where(held < 0, float("-inf"), tl.where(protected, float("inf"), wanted))
    tl.store(priority + pair * capacity + n, ranked, mask=live)


def rank(slots: Slots, priority: Tensor, at: Tensor) -> None:
    """`slots.set_priority(priority)` in one launch, of rows whose newest tokens are at the positions `at` [R]."""
    rows, heads, extent = priority.shape
    if priority.stride(2) != 1:
        priority = priority.contiguous()
    _rank[(rows * heads, triton.cdiv(extent, 1024))](
        slots.priority, slots.positions, priority, at, priority.stride(0), priority.stride(1),
        heads, slots.capacity, extent, slots.window, slots.sinks, BLOCK=1024, num_warps=4, **overlap.options(at),
    )  # fmt: skip


def leaving(slots: Slots, at: Tensor) -> Tokens:
    """The tokens that leave when those at `at` [R] enter; where a row has none yet its position is negative."""
    rows, heads, capacity, dim = slots.keys.shape
    out = room_for_leaving(slots)
    _leaving[(rows * heads,)](
        slots.keys, slots.values, slots.recent, at, out.keys, out.values, out.positions, heads, capacity, slots.window,
        DIM=dim, DIM_PADDED=triton.next_power_of_2(dim), num_warps=1, **overlap.options(at),
    )  # fmt: skip
    return out


def room_for_leaving(slots: Slots) -> Tokens:
    """Keys and values [R, H, 1, D] and positions [R, 1] that nobody has written yet."""
    rows, heads, _, dim = slots.keys.shape
    keys, values = (tensor.new_empty(rows, heads, 1, dim) for tensor in (slots.keys, slots.values))
    return Tokens(keys, values, torch.empty(rows, 1, dtype=torch.int64, device=keys.device))


def enter(slots: Slots, key: Tensor, value: Tensor, at: Tensor, ranked: Tensor | None, frees: bool) -> Tensor | None:
    """Overwrites one slot a row and KV head with the tokens at positions `at`, in place.

    A row that has seen fewer tokens than there are slots has them in order, and its token takes the next. Where slots are
    emptied, each head holds its first slots and no others; then the result says how many after this step [R, H], int32.

    Args:
        slots: of one layer.
        key, value: [R, H, 1, D], any strides but along D.
        at: [R], int64.
        ranked: priorities [R, H] of the tokens that leave the window; None for policies that give none.
        frees: slots of tokens with priority -inf are emptied when they leave.
    """
    rows, heads, capacity, dim = slots.keys.shape
    given = slots.priority if ranked is None else ranked
    block = min(_SLOTS, triton.next_power_of_2(capacity))
    apart = int(triton.next_power_of_2(triton.cdiv(capacity, _SAMPLES)))
    lengths = torch.empty(rows, heads, dtype=torch.int32, device=key.device) if frees else None
    _enter[(rows * heads,)](
        slots.keys, slots.values, slots.positions, slots.priority, slots.recent, key, value, at, given,
        at if lengths is None else lengths,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), given.stride(0), given.stride(1),
        heads, capacity, slots.window, slots.sinks,
        RANKED=ranked is not None, FREES=frees, DIM=dim, DIM_PADDED=triton.next_power_of_2(dim), BLOCK=block,
        SAMPLES=_SAMPLES, APART=apart, num_warps=max(1, min(16, block // 256)), **overlap.options(at),
    )  # fmt: skip
    return lengths
