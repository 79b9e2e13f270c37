"""The running cut-off by a Triton kernel: what `core.ranking.running_cutoff` gives, in one launch (docs/kvpop.md 2.3).

A token t is eligible at query q when sinks <= t <= q - window; the cut-off is the k-th smallest rank of those. Two levels:

1. which block of ranks it lies in. How many eligible tokens each block of ranks has where a block of queries begins is counted
   beforehand; within the block of queries, tokens that become eligible are added one by one.
2. which rank of that block: token_of_rank says for each of them since when it has been eligible.

Queries do not wait for each other, so a program takes a block of them in one head. The counts are (S / 32) x (S / ranks of a
block) numbers a head, which stays below a few times S because blocks of ranks grow with S.

Shapes: R rows, H heads, S tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_QUERIES = 32
"""Queries of a program."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _cutoff(  # type: ignore[no-untyped-def]
    rank, token_of_rank, counts, out, size, sinks, window, k,
    QUERIES: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    block = tl.arange(0, BLOCKS)
    newcomer = query - window
    joins = (newcomer >= sinks) & (query < size)
    where = tl.load(rank + head * size + newcomer, mask=joins, other=-1) // RANKS
    before = tl.load(counts + (head * tl.num_programs(0) + tl.program_id(0)) * BLOCKS + block)
    joined = tl.where(joins[:, None] & (where[:, None] == block[None, :]), 1, 0)
    held = before[None, :] + tl.cumsum(joined, axis=0)
    through = tl.cumsum(held, axis=1)
    # The number of blocks that hold too few together with those before them is the index of the one that is looked for.
    chosen = tl.sum(tl.where(through < k, 1, 0), axis=1)
    rest = k - tl.sum(tl.where(block[None, :] < chosen[:, None], held, 0), axis=1)

    place = tl.arange(0, RANKS)
    ranked = chosen[:, None] * RANKS + place[None, :]
    token = tl.load(token_of_rank + head * size + ranked, mask=ranked < size, other=size)
    eligible = tl.where((token >= sinks) & (token <= newcomer[:, None]), 1, 0)
    offset = tl.sum(tl.where(tl.cumsum(eligible, axis=1) < rest[:, None], 1, 0), axis=1)
    # Where fewer than k are eligible no block holds enough, and the cut-off is S.
    found = tl.where(chosen < BLOCKS, chosen * RANKS + offset, size)
    tl.store(out + head * size + query, found.to(tl.int64), mask=query < size)


def running_cutoff(rank: Tensor, sinks: int, window: int, k: int) -> Tensor:
    """Rank of the k-th best eligible token at each query [R, H, S]; S where fewer than k are eligible, -1 if k is 0.

    Args:
        rank: of each token [R, H, S], int64.
        sinks: first tokens, which are never eligible.
        window: newest tokens, which are not eligible yet.
        k: long-range slots.
    """
    if k <= 0:
        return torch.full_like(rank, -1)
    size, device = rank.shape[-1], rank.device
    flat = rank.reshape(-1, size)
    token = torch.arange(size, device=device)
    token_of_rank = torch.empty(flat.shape, dtype=torch.int32, device=device)
    token_of_rank.scatter_(-1, flat, token.int().expand_as(flat))
    # As many ranks in a block as there are blocks, about.
    ranks = max(128, triton.next_power_of_2(int(size**0.5)))
    blocks = max(16, triton.next_power_of_2(-(-size // ranks)))
    programs = -(-size // _QUERIES)
    # A token counts for all blocks of queries after the one in which it becomes eligible.
    since = (token + window) // _QUERIES + 1
    counted = (token >= sinks) & (since < programs)
    cell = since.clamp(max=programs - 1) * blocks + flat // ranks
    counts = torch.zeros(len(flat), programs * blocks, dtype=torch.int32, device=device)
    counts.scatter_add_(-1, cell, counted.int().expand_as(cell))
    counts = counts.view(len(flat), programs, blocks).cumsum(1, dtype=torch.int32)
    out = torch.empty_like(flat)
    _cutoff[(programs, len(flat))](
        flat.int(), token_of_rank, counts, out, size, sinks, window, k,
        QUERIES=_QUERIES, RANKS=ranks, BLOCKS=blocks, num_warps=4,
    )  # fmt: skip
    return out.view(rank.shape)
