"""The student's attention: each layer sees what the running top-k of its own scores would have kept.

One function is registered with transformers' attention interface; what it needs to know about the current
step arrives as an extra keyword of the model call, `model(input_ids=..., kvbench_step=step)`. It is not
registered with the mask interface, so that transformers makes no mask of its own: rows are padded on the
right, where causal attention never looks.

Shapes: R rows, Hq query heads, H KV heads, S tokens, D head dimension, N sampled queries.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from kvbench.core.policy import Scorer, Split
from kvbench.core.ranking import keep_mask, ranks, running_cutoff
from kvbench.train.losses import Sample, boundary_loss
from kvbench.train.target import future_target

NAME = "kvbench_student"
"""The attention implementation to set on the model that is trained."""


@dataclass
class Step:
    """What one forward pass of the student is given, and what its layers leave behind.

    Attributes:
        split: of this step's budget.
        lengths: true length of each row [R].
        sample: queries of the measurements.
        pairs: queries of the boundary loss.
        pairs_long: long-range slots that the boundary loss imagines; from 1 to those of `split`.
        scorers: one a layer; None keeps the newest tokens.
        sparse_normaliser: masses are relative to what each query still sees, not to all earlier tokens.
        power: of the mean that the target takes, see `future_mass`.
        margin, balance: see `boundary_loss`.
        measure: also compute `recall` and `mass`.
        boundary: boundary loss of each layer, a scalar.
        recall: share of the teacher's long-range set that the student's holds, of each layer, a scalar.
        mass: share of dense attention that goes to what the student keeps, of each layer, a scalar.
    """

    split: Split
    lengths: Tensor
    sample: Sample
    pairs: Sample
    pairs_long: int
    scorers: nn.ModuleList | None = None
    sparse_normaliser: bool = False
    power: float = 1.0
    margin: float = 0.5
    balance: bool = False
    measure: bool = False
    # Keyed by layer, so that a layer that is computed twice does not count twice.
    boundary: dict[int, Tensor] = field(default_factory=dict)
    recall: dict[int, Tensor] = field(default_factory=dict)
    mass: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [R, Hq, S, D], key and value [R, H, S, D] after RoPE -> output [R, Hq, S, D]."""
        split = self.split
        with torch.autocast(query.device.type, enabled=False):
            scorer = None if self.scorers is None else self.scorers[layer]
            priority = student_priority(scorer, key, value)
            with torch.no_grad():
                rank = ranks(priority)
                cutoff = running_cutoff(rank, split.sinks, split.window, split.long)
                keep = keep_mask(rank, cutoff, split.sinks, split.window)
            # Without long-range slots there is nothing that a teacher could choose differently.
            if split.long > 0 and (scorer is not None or self.measure):
                self._compare(layer, scorer, query.detach(), key.detach(), scale, priority, rank, cutoff, keep)
            if self.measure:
                self.mass[layer] = _retained_mass(query.detach(), key.detach(), scale, keep, self.sample)
        return masked_attention(query, key, value, keep, scale)

    def _compare(
        self,
        layer: int,
        scorer: nn.Module | None,
        query: Tensor,
        key: Tensor,
        scale: float,
        priority: Tensor,
        rank: Tensor,
        cutoff: Tensor,
        keep: Tensor,
    ) -> None:
        """Sets the layer's boundary loss and, if asked to, its recall."""
        split = self.split
        with torch.no_grad():
            target = future_target(
                query, key, scale, split.window, self.lengths, keep if self.sparse_normaliser else None, self.power
            )
            # Teacher and student share the decay.
            teacher = target if scorer is None else _static(scorer, target)
            teacher_rank = ranks(teacher)
            if self.measure:
                teacher_cutoff = running_cutoff(teacher_rank, split.sinks, split.window, split.long)
                self.recall[layer] = _recall(split, self.sample, (rank, cutoff), (teacher_rank, teacher_cutoff))
        if scorer is not None:
            self.boundary[layer] = boundary_loss(
                priority,
                teacher,
                teacher_rank,
                running_cutoff(teacher_rank, split.sinks, split.window, self.pairs_long),
                self.pairs,
                split.window,
                margin=self.margin,
                balance=self.balance,
            )


def student_priority(scorer: nn.Module | None, key: Tensor, value: Tensor) -> Tensor:
    """Static priority [R, H, S] in fp32 from keys and values [R, H, S, D]; recency without a scorer.

    The scorer reads detached inputs: the boundary loss never reaches the LM.
    """
    if scorer is None:
        rows, heads, size, _ = key.shape
        return torch.arange(size, device=key.device, dtype=torch.float32).expand(rows, heads, size)
    return _static(scorer, scorer(key.detach().float(), value.detach().float()))


def _static(scorer: nn.Module, scores: Tensor) -> Tensor:
    assert isinstance(scorer, Scorer)
    rows, _, size = scores.shape
    return scorer.priority(scores, torch.arange(size, device=scores.device).expand(rows, -1))


def masked_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Attention [R, Hq, S, D] under a boolean mask [R, H, S, S] that the query heads of a group share."""
    rows, heads, size, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    # Rows and KV heads become the batch, so that one mask serves all query heads of its group.
    flat = (rows * kv_heads, group, size, dim)
    single = (rows * kv_heads, 1, size, dim)
    # On a GPU this is the only fused kernel that takes such a mask.
    fused = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if query.is_cuda else nullcontext()
    with fused:
        out = functional.scaled_dot_product_attention(
            query.reshape(flat),
            key.reshape(single).repeat(1, group, 1, 1),
            value.reshape(single).repeat(1, group, 1, 1),
            attn_mask=keep.reshape(rows * kv_heads, 1, size, size),
            scale=scale,
        )
    return out.reshape(rows, heads, size, dim)


def _recall(split: Split, sample: Sample, student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over heads and valid queries of |student's long-range set & teacher's| / k, a scalar."""
    queries = sample.queries
    token = torch.arange(student[0].shape[-1], device=queries.device)
    eligible = (token >= split.sinks) & (token <= queries[..., None] - split.window)
    both = eligible[:, None]
    for rank, cutoff in (student, teacher):
        limit = cutoff.gather(-1, queries[:, None].expand(-1, rank.shape[1], -1))
        both = both & (rank[:, :, None] <= limit[..., None])
    return _mean(both.sum(-1) / split.long, sample)


@torch.no_grad()
def _retained_mass(query: Tensor, key: Tensor, scale: float, keep: Tensor, sample: Sample) -> Tensor:
    """Mean over heads and valid queries of the dense attention weight on kept tokens, a scalar."""
    rows, heads, _, dim = query.shape
    kv_heads, size = key.shape[1], key.shape[2]
    index = sample.queries[:, None, :, None]
    chosen = query.float().gather(2, index.expand(-1, heads, -1, dim))
    logits = chosen.reshape(rows, kv_heads, -1, dim) @ key.float().transpose(-1, -2) * scale
    logits = logits.reshape(rows, kv_heads, heads // kv_heads, -1, size)
    causal = torch.arange(size, device=key.device) <= sample.queries[..., None]
    weights = logits.masked_fill(~causal[:, None, None], -torch.inf).softmax(-1)
    seen = keep.gather(2, index.expand(-1, kv_heads, -1, size))
    return _mean((weights * seen[:, :, None]).sum(-1).mean(2), sample)


def _mean(values: Tensor, sample: Sample) -> Tensor:
    """Mean of values [R, H, N] over heads and valid queries."""
    return (values * sample.valid[:, None]).sum() / (sample.valid.sum() * values.shape[1]).clamp(min=1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of the interface
    *,
    scaling: float,
    kvbench_step: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    layer = module.layer_idx
    assert isinstance(layer, int)
    return kvbench_step.attend(layer, query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
