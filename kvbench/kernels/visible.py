"""What queries see, as numbers that a kernel can compare: one row of tokens laid end to end, three numbers a token.

    query q sees token t  <=>  t <= q  and ( t > near[q]  or  rank[h, t] <= cutoff[h, q] )

Rows of a batch become pieces of one long row, so that a kernel is compiled for a length and not for a shape. Sinks get a
rank below every cut-off. Ranks of earlier rows lie above every cut-off of later ones, so that nobody sees across a border.
Which blocks of keys a block of queries needs follows from the extremes of these numbers in the blocks (docs/kvpop.md 2.5);
no S x S matrix is evaluated.

Shapes: R rows, H KV heads, S tokens of a row, N tokens of the long row, n = N / 128 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.ranking import Kept

BLOCK = 128
"""Tokens of a block."""

_SINK = -2
"""Rank of a sink; the lowest cut-off is -1."""

_LARGEST = 2**31 - 1


def padded(tokens: int) -> int:
    """Length of the long row for so many tokens: whole blocks, and at most two lengths between powers of two.

    Each length is compiled once; what fills up costs a block of its own a block, not a square.
    """
    step = max(BLOCK, 1 << max(0, (tokens - 1).bit_length() - 2))
    return -(-tokens // step) * step


@dataclass(frozen=True)
class Visible:
    """What each query sees.

    Attributes:
        near: a query sees all tokens after this one [N], int32.
        rank: of each token [H, N], int32; None where nothing further is seen.
        cutoff: highest rank that each query sees [H, N], int32.
    """

    near: Tensor
    rank: Tensor | None = None
    cutoff: Tensor | None = None

    @classmethod
    def of(cls, kept: Kept, lengths: Tensor | None = None) -> Visible:
        """What `kept` of [R, H, S] keeps.

        Tokens behind the true lengths [R], where these are given, see and are seen by themselves only.
        """
        rows, _, size = kept.rank.shape
        token = torch.arange(size, device=kept.rank.device)
        far = _rows_apart(rows, size, token)
        rank = kept.rank.masked_fill(token < kept.sinks, _SINK) + far
        cutoff, near = kept.cutoff + far, _near(rows, size, kept.window, token)
        if lengths is not None:
            padding = token >= lengths[:, None]
            rank = rank.masked_fill(padding[:, None], _LARGEST)
            cutoff = cutoff.masked_fill(padding[:, None], -_LARGEST)
            near = torch.where(_flat(padding, len(near)), torch.arange(len(near), device=near.device) - 1, near).int()
        return cls(near, _laid(rank, _LARGEST), _laid(cutoff, -_LARGEST))

    @classmethod
    def causal(cls, rows: int, size: int, device: torch.device) -> Visible:
        """Each query sees all earlier tokens of its row."""
        return cls(_near(rows, size, size, torch.arange(size, device=device)))

    def mask(self, head: int = 0) -> Tensor:
        """The same as a matrix [N, N], bool: the definition, for tests."""
        token = torch.arange(len(self.near), device=self.near.device)
        seen = token > self.near[:, None]
        if self.rank is not None and self.cutoff is not None:
            seen = seen | (self.rank[head] <= self.cutoff[head, :, None])
        return seen & (token <= token[:, None])

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Which blocks of keys each block of queries has to look at, and of which it sees everything [H, n, n], bool.

        Both from bounds: the first may name too many, the second too few. They have no block in common.
        """
        count = len(self.near) // BLOCK
        first = torch.arange(count, device=self.near.device) * BLOCK
        last = first + BLOCK - 1
        query, key = (slice(None), None), (None, slice(None))
        # Within the causal part: some pair is seen, or every pair is.
        lowest, highest = self.near.view(count, BLOCK).aminmax(dim=-1)
        some, every = last[key] > lowest[query], first[key] > highest[query]
        some, every = some[None], every[None]
        if self.rank is not None and self.cutoff is not None:
            best, worst = self.rank.view(-1, count, BLOCK).aminmax(dim=-1)
            strictest, loosest = self.cutoff.view(-1, count, BLOCK).aminmax(dim=-1)
            some = some | (best[:, None, :] <= loosest[:, :, None])
            every = every | (worst[:, None, :] <= strictest[:, :, None])
        every = every & (last[key] <= first[query])
        return some & (first[key] <= last[query]) & ~every, every


def _rows_apart(rows: int, size: int, token: Tensor) -> Tensor:
    """What is added to ranks and cut-offs of each row [R, 1, 1], so that none of a row compares with another's."""
    return (rows - 1 - torch.arange(rows, device=token.device))[:, None, None] * (size - _SINK + 2)


def _near(rows: int, size: int, window: int, token: Tensor) -> Tensor:
    start = torch.arange(rows, device=token.device)[:, None] * size
    near = (token - window).clamp(min=-1) + start
    filled = torch.arange(padded(rows * size), dtype=torch.int32, device=token.device) - 1
    # What fills up sees itself, so that no query is without a key.
    filled[: rows * size] = near.flatten()
    return filled


def _flat(padding: Tensor, size: int) -> Tensor:
    """[R, S] -> [N], bool."""
    return torch.nn.functional.pad(padding.flatten(), (0, size - padding.numel()), value=True)


def _laid(numbers: Tensor, fill: int) -> Tensor:
    """[R, H, S] -> [H, N], int32."""
    rows, heads, size = numbers.shape
    out = torch.full((heads, padded(rows * size)), fill, dtype=torch.int32, device=numbers.device)
    out[:, : rows * size] = numbers.transpose(0, 1).reshape(heads, -1)
    return out
