"""Triton kernels: the largest number of each row, where it stands, and the next largest, in one pass over the logits.

Plain form: `topk(2)` and `argmax`; of equal numbers the first is the largest, and the next largest equals it. Shapes: R rows, V
numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = 4096


@triton.jit
def _two(values, places):  # type: ignore[no-untyped-def]
    """Largest of a block, its place, and the next largest; places are different numbers."""
    NOWHERE: tl.constexpr = 2147483647
    best = tl.max(values, 0)
    place = tl.min(tl.where(values == best, places, NOWHERE), 0)
    return best, place, tl.max(tl.where(places == place, float("-inf"), values), 0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _of_parts(logits, best, place, second, size, PARTS, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    n = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * size + n, mask=n < size, other=float("-inf")).to(tl.float32)
    values = tl.where(values != values, float("-inf"), values)
    largest, where, following = _two(values, n)
    tl.store(best + row * PARTS + part, largest)
    tl.store(place + row * PARTS + part, where)
    tl.store(second + row * PARTS + part, following)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _of_all(best, place, second, token, margin, PARTS, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PADDED)
    values = tl.load(best + row * PARTS + p, mask=p < PARTS, other=float("-inf"))
    # Parts that are not there have places of their own, beyond all others.
    places = tl.load(place + row * PARTS + p, mask=p < PARTS, other=0)
    places = tl.where(p < PARTS, places, 2147483646 - p)
    largest, where, following = _two(values, places)
    seconds = tl.load(second + row * PARTS + p, mask=p < PARTS, other=float("-inf"))
    tl.store(token + row, where.to(tl.int64))
    tl.store(margin + row, largest - tl.maximum(following, tl.max(seconds, 0)))


def best_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Where the largest of logits [R, V] stands [R], int64, and by how much it is larger than any other [R], fp32."""
    rows, size = logits.shape
    logits = logits.contiguous()
    parts = triton.cdiv(size, _PART)
    best, second = (torch.empty(rows, parts, device=logits.device) for _ in range(2))
    place = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _of_parts[(rows, parts)](logits, best, place, second, size, parts, PART=_PART, num_warps=8)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    margin = torch.empty(rows, device=logits.device)
    _of_all[(rows,)](best, place, second, token, margin, parts, PADDED=triton.next_power_of_2(parts), num_warps=1)
    return token, margin
