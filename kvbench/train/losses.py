"""The loss of a scorer that ranks, and the queries at which it is taken.

It learns which of two tokens the teacher's running top-k keeps (KVpop: boundary loss). The LM's loss is in
`distill.py`.

Shapes: R rows, H KV heads, S tokens, N sampled queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvbench.core.ranking import Kept


@dataclass(frozen=True)
class Sample:
    """Queries of each row at which the boundary is looked at.

    Attributes:
        queries: [R, N], int64; all of them valid indices, also where `valid` is False.
        valid: [R, N], bool; False in rows that are too short to evict anything.
        total: valid queries of the whole step, of which these may be one process's part; means are over all of them.
    """

    queries: Tensor
    valid: Tensor
    total: int

    def take(self, rows: Tensor) -> Sample:
        """The sample of these rows [r]; `total` stays that of all."""
        return Sample(self.queries[rows], self.valid[rows], self.total)

    def nothing(self) -> Sample:
        """As many rows without a valid query."""
        return Sample(torch.zeros_like(self.queries), torch.zeros_like(self.valid), self.total)

    def mean(self, values: Tensor) -> Tensor:
        """These rows' part of the mean of values [R, H, N] over heads and all valid queries, a scalar."""
        return (values * self.valid[:, None]).sum() / max(1, self.total * values.shape[1])

    def to(self, device: torch.device) -> Sample:
        """The same sample on another device."""
        queries, valid = (tensor.to(device, non_blocking=True) for tensor in (self.queries, self.valid))
        return Sample(queries, valid, self.total)


def sample_queries(lengths: Tensor, first: int, future: int, count: int, generator: torch.Generator) -> Sample:
    """Draws `count` queries a row from [first, length - future], half uniform, half later-biased.

    Args:
        lengths: true length of each row [R], int64, on the CPU.
        first: the first query at which something is evicted: sinks + window + long-range slots.
        future: the token that leaves at a sampled query has at least so many to average its mass over.
        count: queries a row (N).
        generator: on the CPU; the draw depends on nothing else.
    """
    last = lengths - future
    span = (last - first).clamp(min=0)[:, None]
    uniform = torch.rand(lengths.shape[0], count, generator=generator)
    # sqrt of a uniform number has the density 2x: later queries, where the choice is harder, come up more.
    uniform[:, count // 2 :] = uniform[:, count // 2 :].sqrt()
    queries = first + (uniform * (span + 1)).long().minimum(span)
    valid = (last >= first)[:, None].expand_as(queries)
    return Sample(torch.where(valid, queries, 0), valid, int(valid.sum()))


def boundary_loss(
    student: Tensor,
    teacher: Tensor,
    kept: Kept,
    sample: Sample,
    *,
    margin: float = 0.5,
    temperature: float = 1.0,
    balance: bool = False,
) -> Tensor:
    """Whether the student orders newcomer and incumbent as the teacher does at the sampled queries; a scalar.

    At query q the newcomer is u = q - window, and the incumbent b the teacher's k-th best of what was
    eligible at q - 1: the one comparison that decides who is kept. Near-ties of the teacher count little, by
    the weight 1 - exp(-gap / margin).

    Args:
        student: static priority [R, H, S] in fp32, with gradient.
        teacher: static priority of the target [R, H, S].
        kept: what the teacher keeps.
        sample: the queries.
        margin: gap, in nats, at which the weight of a pair is 63 %; 0 weighs all pairs the same.
        temperature: divides the student's difference.
        balance: weights the pairs of each head so that both outcomes count the same; counted in these rows.
    """
    rank, size = kept.rank, kept.rank.shape[-1]
    queries = sample.queries[:, None].expand(-1, rank.shape[1], -1)
    newcomer = (queries - kept.window).clamp(min=0)
    token_of_rank = torch.empty_like(rank).scatter_(-1, rank, torch.arange(size, device=rank.device).expand_as(rank))
    # Where nothing is evicted yet the cutoff is S; such queries are invalid, the clamp keeps them in bounds.
    boundary = kept.cutoff.gather(-1, (queries - 1).clamp(min=0)).clamp(0, size - 1)
    incumbent = token_of_rank.gather(-1, boundary)
    stays = rank.gather(-1, newcomer) < boundary
    gap = (teacher.gather(-1, newcomer) - teacher.gather(-1, incumbent)).abs()
    weight = 1 - torch.exp(-gap / margin) if margin else torch.ones_like(gap)
    if balance:
        weight = weight * _balanced(stays, sample.valid[:, None].expand_as(stays))
    difference = student.gather(-1, newcomer) - student.gather(-1, incumbent)
    sign = torch.where(stays, 1.0, -1.0)
    return sample.mean(weight * functional.softplus(-sign * difference / temperature))


def _balanced(kept: Tensor, valid: Tensor) -> Tensor:
    """Inverse frequency of each pair's outcome in its head [R, H, N], clipped at both ends."""
    total = valid.sum((0, 2), keepdim=True).clamp(min=1)
    ups = (kept & valid).sum((0, 2), keepdim=True)
    count = torch.where(kept, ups, total - ups).clamp(min=1)
    return (total / (2 * count)).clamp(0.2, 5)
