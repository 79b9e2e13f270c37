"""A Triton kernel: query and key heads as attention needs them, from one product: norm of each head, then rotation.

The same launch copies the token that leaves the window, which depends on none of this.

Plain form: the model's own `q_norm`, `k_norm` and `apply_rotary_pos_emb` (Qwen3, Llama: the second half of a head is turned
against the first). Shapes: R rows, Hq query heads, H KV heads, D head dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.core.policy import Tokens
from kvbench.core.slots import Slots
from kvbench.kernels import overlap
from kvbench.kernels.overlap import after_the_last
from kvbench.kernels.slots import room_for_leaving, take_leaving


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _rotated(  # type: ignore[no-untyped-def]
    given, query_gain, key_gain, cos, sin, query, key, query_heads, heads, eps,
    keys, values, recent, at, old_keys, old_values, old_at, capacity, window,
    NORM: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_the_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head >= query_heads + heads:
        take_leaving(
            row * heads + head - query_heads - heads, keys, values, recent, at, old_keys, old_values, old_at,
            heads, capacity, window, DIM, DIM_PADDED,
        )  # fmt: skip
        return
    d = tl.arange(0, DIM_PADDED)
    mask = d < DIM
    # The other half of the head, and its sign.
    half: tl.constexpr = DIM // 2
    partner = tl.where(d < half, d + half, d - half)
    sign = tl.where(d < half, -1.0, 1.0)
    place = given + (row * (query_heads + 2 * heads) + head) * DIM
    one = tl.load(place + d, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(place + partner, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(one * one, 0) / DIM + eps)
        gain = query_gain
        if head >= query_heads:
            gain = key_gain
        one *= scale * tl.load(gain + d, mask=mask, other=0.0).to(tl.float32)
        other *= scale * tl.load(gain + partner, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + row * DIM + d, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + row * DIM + d, mask=mask, other=0.0).to(tl.float32)
    turned = (one * c + sign * other * s).to(query.dtype.element_ty)
    if head < query_heads:
        tl.store(query + (row * query_heads + head) * DIM + d, turned, mask=mask)
    else:
        tl.store(key + (row * heads + head - query_heads) * DIM + d, turned, mask=mask)


def rotated(
    given: Tensor,
    heads: tuple[int, int],
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Slots,
    at: Tensor,
    leaves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tokens | None]:
    """Query [R, Hq, 1, D], key and value [R, H, 1, D] from what stands side by side [R, (Hq + 2 H) D]; value is a view.

    And the tokens that leave the window of `slots` when those at `at` enter, if `leaves`.

    Args:
        given: contiguous.
        heads: Hq and H.
        gains: of the norms of query and key heads [D]; None without.
        eps: of these norms.
        cos, sin: of each row's position [R, D], contiguous.
        slots: of the layer.
        at: positions [R].
        leaves: whether the tokens that leave are wanted.
    """
    query_heads, kv_heads = heads
    rows, dim = len(given), given.shape[1] // (query_heads + 2 * kv_heads)
    query, key = given.new_empty(rows, query_heads, 1, dim), given.new_empty(rows, kv_heads, 1, dim)
    first, second = gains or (given, given)
    old = room_for_leaving(slots) if leaves else None
    target = old or Tokens(key, key, at)
    _rotated[(rows, query_heads + kv_heads * (2 if leaves else 1))](
        given, first, second, cos, sin, query, key, query_heads, kv_heads, eps,
        slots.keys, slots.values, slots.recent, at, target.keys, target.values, target.positions,
        slots.capacity, slots.window,
        NORM=gains is not None, DIM=dim, DIM_PADDED=triton.next_power_of_2(dim), num_warps=1,
        **overlap.options(given),
    )  # fmt: skip
    value = given[:, (query_heads + kv_heads) * dim :].view(rows, kv_heads, 1, dim)
    return query, key, value, old
