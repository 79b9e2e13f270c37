"""The two losses of a learned policy, and the queries at which the second is taken.

The LM learns by distillation from the dense model; the scorer learns which of two tokens the teacher's
running top-k keeps (KVpop: boundary loss). Their parameters are disjoint.

Shapes: R rows, H KV heads, S tokens, N sampled queries, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Sample:
    """Queries of each row at which the boundary is looked at.

    Attributes:
        queries: [R, N], int64; all of them valid indices, also where `valid` is False.
        valid: [R, N], bool; False in rows that are too short to evict anything.
    """

    queries: Tensor
    valid: Tensor

    def to(self, device: torch.device) -> Sample:
        """The same sample on another device."""
        return Sample(self.queries.to(device, non_blocking=True), self.valid.to(device, non_blocking=True))


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
    return Sample(torch.where(valid, queries, 0), valid)


def boundary_loss(
    student: Tensor,
    teacher: Tensor,
    rank: Tensor,
    cutoff: Tensor,
    sample: Sample,
    window: int,
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
        rank: `ranking.ranks(teacher)`.
        cutoff: `ranking.running_cutoff` of `rank`.
        sample: the queries.
        window: protected tokens.
        margin: gap, in nats, at which the weight of a pair is 63 %.
        temperature: divides the student's difference.
        balance: weights the pairs of each head so that both outcomes count the same.
    """
    heads = rank.shape[1]
    queries = sample.queries[:, None].expand(-1, heads, -1)
    newcomer = (queries - window).clamp(min=0)
    token_of_rank = torch.empty_like(rank).scatter_(
        -1, rank, torch.arange(rank.shape[-1], device=rank.device).expand_as(rank)
    )
    # Where nothing is evicted yet the cutoff is S; such queries are invalid, the clamp keeps them in bounds.
    boundary = cutoff.gather(-1, (queries - 1).clamp(min=0)).clamp(0, rank.shape[-1] - 1)
    incumbent = token_of_rank.gather(-1, boundary)
    kept = rank.gather(-1, newcomer) < boundary
    gap = (teacher.gather(-1, newcomer) - teacher.gather(-1, incumbent)).abs()
    weight = (1 - torch.exp(-gap / margin)) * sample.valid[:, None]
    if balance:
        weight = weight * _balanced(kept, sample.valid[:, None].expand_as(kept))
    difference = student.gather(-1, newcomer) - student.gather(-1, incumbent)
    sign = torch.where(kept, 1.0, -1.0)
    losses = functional.softplus(-sign * difference / temperature)
    return (weight * losses).sum() / (sample.valid.sum() * heads).clamp(min=1)


def _balanced(kept: Tensor, valid: Tensor) -> Tensor:
    """Inverse frequency of each pair's outcome in its head [R, H, N], clipped at both ends."""
    total = valid.sum((0, 2), keepdim=True).clamp(min=1)
    ups = (kept & valid).sum((0, 2), keepdim=True)
    count = torch.where(kept, ups, total - ups).clamp(min=1)
    return (total / (2 * count)).clamp(0.2, 5)


def distillation(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, top: int = 256) -> Tensor:
    """Forward KL from teacher to student over the teacher's `top` most likely tokens; a mean, a scalar.

    The teacher is renormalised over these tokens; the student's log-probabilities are over the whole
    vocabulary, so that mass it puts elsewhere is penalised.

    Args:
        student_logits: [R, S, V], with gradient.
        teacher_logits: [R, S, V].
        mask: positions that count [R, S], bool.
        top: tokens compared at each position; all of them if the vocabulary is smaller.
    """
    wanted = teacher_logits.detach().float()
    log_student = student_logits.float().log_softmax(-1)
    if top < wanted.shape[-1]:
        wanted, index = wanted.topk(top, -1)
        log_student = log_student.gather(-1, index)
    log_teacher = wanted.log_softmax(-1)
    kl = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)
    return (kl * mask).sum() / mask.sum().clamp(min=1)
