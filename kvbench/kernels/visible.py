"""What queries see, as numbers that a kernel can compare: one row of tokens laid end to end, a few numbers a token.

    query q sees token t  <=>  t <= q  and ( t > near[q]  or  rank[h, t] <= cutoff[h, q] )

Rows of a batch become pieces of one long row, so that a kernel is compiled for a length and not for a shape. Sinks get a
rank below every cut-off. Ranks of earlier rows lie above every cut-off of later ones, so that nobody sees across a border.

What a late query sees beyond its window is few tokens, but scattered over most blocks. In order of rank they are a beginning.
So there are two keys of each token: e = 0 .. N - 1 in the KV head's order of rank, then e = N .. 2 N - 1 in order of time. What
lies beyond the window is read from one or the other, for each block of queries from the one that takes fewer blocks of keys:

    query q sees key e  <=>  e <= N + q  and ( e > N + near[q]  or  ( mark[h, e] <= limit[h, q]  and  e <= last[h, q] ) )

                    mark of keys in order of rank       of time    limit of the query    last
    by time         above every cut-off                 rank       cutoff                no bound
    by rank         _LATER + first query beyond         any        _LATER + q            last key of a rank <= cutoff
                    whose window the token is

Which blocks of keys a block of queries needs follows from the extremes of these numbers in the blocks (docs/kvpop.md 2.5);
no S x S matrix is evaluated.

Shapes: R rows, H KV heads, S tokens of a row, N tokens of the long row, n = N / 128 blocks; E keys, m = E / 128 blocks of them:
2 N and 2 n, or N and n where queries see nothing beyond their window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.ranking import Kept

BLOCK = 128
"""Tokens of a block."""

_SINK = -2
"""Rank of a sink; the lowest cut-off is -1."""

_LARGEST = 2**31 - 1

_LATER = 2**30
"""Above every rank and cut-off of real tokens."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def padded(tokens: int) -> int:
    """Length of the long row for so many tokens: whole blocks, and at most two lengths between powers of two.

    Each length is compiled once; what fills up costs a block of its own a block, not a square.
    """
    step = max(BLOCK, 1 << max(0, (tokens - 1).bit_length() - 2))
    return -(-tokens // step) * step


@dataclass(frozen=True)
class Far:
    """What each query sees beyond its window, see above.

    Attributes:
        order: token of each key in order of rank [H, N], int64.
        mark: of each key [H, E], int32.
        limit: largest mark that each query sees [H, N], int32.
        last: last key that each query sees [H, N], int32.
    """

    order: Tensor
    mark: Tensor
    limit: Tensor
    last: Tensor


@dataclass(frozen=True)
class Visible:
    """What each query sees.

    Attributes:
        near: a query sees all keys after this one, up to its own [N], int32.
        far: what it sees further; None for nothing, and then there is only one key of each token.
    """

    near: Tensor
    far: Far | None = None

    @classmethod
    def of(cls, kept: Kept, lengths: Tensor | None = None) -> Visible:
        """What `kept` of [R, H, S] keeps.

        Tokens behind the true lengths [R], where these are given, see and are seen by themselves only.
        """
        rows, _, size = kept.rank.shape
        token = torch.arange(size, device=kept.rank.device)
        apart = _rows_apart(rows, size, token)
        rank = kept.rank.masked_fill(token < kept.sinks, _SINK) + apart
        cutoff, near = kept.cutoff + apart, _near(rows, size, kept.window, token)
        if lengths is not None:
            padding = token >= lengths[:, None]
            rank = rank.masked_fill(padding[:, None], _LARGEST)
            cutoff = cutoff.masked_fill(padding[:, None], -_LARGEST)
            near = torch.where(_flat(padding, len(near)), torch.arange(len(near), device=near.device) - 1, near).int()
        return cls._in_fewest_blocks(near, _laid(rank, _LARGEST), _laid(cutoff, -_LARGEST), kept.window)

    @classmethod
    def causal(cls, rows: int, size: int, device: torch.device) -> Visible:
        """Each query sees all earlier tokens of its row."""
        return cls(_near(rows, size, size, torch.arange(size, device=device)))

    @classmethod
    def _in_fewest_blocks(cls, near: Tensor, rank: Tensor, cutoff: Tensor, window: int) -> Visible:
        """Of tokens after `near` [N] and those of a rank [H, N] up to the cut-off [H, N], by time or by rank."""
        size = len(near)
        # Among equal ranks the order of time stays, and with it blocks that lie ahead of a query.
        in_order, order = rank.sort(dim=-1, stable=True)
        mark = torch.cat((_LATER + order + min(window, size), rank), -1).int()
        later = _LATER + torch.arange(size, dtype=torch.int32, device=near.device).expand_as(cutoff)
        last = torch.searchsorted(in_order, cutoff, right=True, out_int32=True) - 1
        by_time = cls(near + size, Far(order, mark, cutoff, torch.full_like(cutoff, _LARGEST)))
        by_rank = cls(near + size, Far(order, mark, later, last))
        fewer = by_rank._bounds()[0].sum(-1) < by_time._bounds()[0].sum(-1)
        ranked = fewer.repeat_interleave(BLOCK, -1)
        limit, last = torch.where(ranked, later, cutoff), torch.where(ranked, last, _LARGEST)
        return cls(near + size, Far(order, mark, limit, last))

    def mask_mod(self, group: int = 1) -> MaskMod:
        """Whether a query [..] of a query head [..] sees a key [..]; query heads in groups of `group`."""
        near, far, ahead = self.near, self.far, len(self.near)
        if far is None:

            def causal(b: Tensor, h: Tensor, q: Tensor, e: Tensor) -> Tensor:  # noqa: ARG001 - the kernel's signature
                return (e <= q) & (e > near[q])

            return causal
        mark, limit, last = far.mark, far.limit, far.last

        def ranked(b: Tensor, h: Tensor, q: Tensor, e: Tensor) -> Tensor:  # noqa: ARG001 - the kernel's signature
            further = (mark[h // group, e] <= limit[h // group, q]) & (e <= last[h // group, q])
            return (e <= q + ahead) & ((e > near[q]) | further)

        return ranked

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Which blocks of keys each block of queries has to look at, and of which it sees everything [H, n, m], bool.

        Both from bounds: the first may name too many, the second too few. They have no block in common.
        """
        some, every = self._bounds()
        return some & ~every, every

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """Of which blocks of keys each block of queries may see some, and of which it sees everything [H, n, m], bool."""
        count = len(self.near) // BLOCK
        keys = count if self.far is None else 2 * count
        first = torch.arange(keys, device=self.near.device) * BLOCK
        last = first + BLOCK - 1
        query, key = (..., slice(None), None), (..., None, slice(None))
        lowest, highest = _extremes(self.near[None])
        some, every = last[key] > lowest[query], first[key] > highest[query]
        if self.far is not None:
            best, worst = _extremes(self.far.mark)
            strictest, loosest = _extremes(self.far.limit)
            shortest, longest = _extremes(self.far.last)
            some = some | ((best[key] <= loosest[query]) & (first[key] <= longest[query]))
            every = every | ((worst[key] <= strictest[query]) & (last[key] <= shortest[query]))
        # The last keys are those of the queries themselves.
        return some & (first[key] <= last[-count:][query]), every & (last[key] <= first[-count:][query])


def _extremes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest of each block, [H, n] each."""
    lowest, highest = numbers.view(len(numbers), -1, BLOCK).aminmax(dim=-1)
    return lowest, highest


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
