"""The student's attention: each layer sees what the policy would have kept by the scores of its own scorer.

What a step needs to know arrives as an extra keyword of the model call, `model(input_ids=..., kvbench_step=step)`.
`Step.attend` knows queries, keys and values of a layer; everything that needs all pairs of them is behind two
functions, `kernels.attention.attention_over` and `target.future_target`, which see a mask only as ranks and cut-offs.

Shapes: R rows (documents where attention is reset), Hq query heads, H KV heads, S tokens, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvbench.core.policy import Gate, Scorer, Split
from kvbench.core.ranking import Kept
from kvbench.kernels.attention import attention_over, biased_attention, computed_in
from kvbench.kernels.kept import keep
from kvbench.train import relaxed
from kvbench.train.attached import scorer_of, with_loss
from kvbench.train.documents import Documents
from kvbench.train.losses import Pairs, Sample, boundary_loss
from kvbench.train.target import TargetKind, future_target


@dataclass(frozen=True)
class Objective:
    """How scorers are taught.

    Attributes:
        target: variant of the future-attention target.
        margin, balance: see `boundary_loss`.
    """

    target: TargetKind = field(default_factory=TargetKind)
    margin: float = 0.5
    balance: bool = False


@dataclass
class Step:
    """What one forward pass of the student is given, and what its layers leave behind.

    Attributes:
        split: of this step's budget.
        lengths: true length of each row [R].
        sample: queries of the measurements.
        pairs: queries of the boundary loss.
        objective: of the scorers.
        documents: where attention is reset; None for one document a row.
        gate: how gates decide in this step; only for policies that have them.
        factor: gradient of each layer's own loss, a scalar that may be filled in until the backward pass.
        measure: also compute `recall` and `mass`.
        boundary: boundary loss of each layer, a scalar.
        recall: share of the teacher's long-range set that the student's holds, of each layer, a scalar.
        mass: share of dense attention that goes to what the student keeps, of each layer, a scalar.
        closed: share of gates that are closed, of each layer, a scalar.
    """

    split: Split
    lengths: Tensor
    sample: Sample
    pairs: Pairs
    objective: Objective = field(default_factory=Objective)
    documents: Documents | None = None
    gate: relaxed.GateStep | None = None
    factor: Tensor = field(default_factory=lambda: torch.ones(()))
    measure: bool = False
    # Keyed by layer, so that a layer that is computed twice does not count twice.
    boundary: dict[int, Tensor] = field(default_factory=dict)
    recall: dict[int, Tensor] = field(default_factory=dict)
    mass: dict[int, Tensor] = field(default_factory=dict)
    closed: dict[int, Tensor] = field(default_factory=dict)
    _ranked: dict[int, _Ranked] = field(default_factory=dict)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [R, Hq, S, D], key and value [R, H, S, D] after RoPE -> output [R, Hq, S, D]."""
        layer, scorer = module.layer_idx, scorer_of(module)
        assert isinstance(layer, int)
        if self.documents is not None:
            query, key, value = (self.documents.unpack(tensor) for tensor in (query, key, value))
        if isinstance(scorer, Gate):
            out = self._decide(layer, scorer, query, key, value, scale)
        else:
            out = self._rank(layer, scorer, query, key, value, scale)
        return out if self.documents is None else self.documents.pack(out)

    def _rank(
        self, layer: int, scorer: nn.Module | None, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Attention over the running top-k; a scorer's loss is attached."""
        split, ranked = self.split, self._ranked.get(layer)
        with torch.autocast(query.device.type, enabled=False):
            priority = student_priority(scorer, key, value)
            kept = keep(priority.detach(), split.sinks, split.window, split.long) if ranked is None else ranked.kept
        query, key, value = computed_in(query, key, value)
        out, normaliser = attention_over(query, key, value, kept, scale, self.lengths)
        with torch.autocast(query.device.type, enabled=False):
            if ranked is None:
                ranked = self._ranked[layer] = self._compare(layer, scorer, query, key, scale, kept, normaliser)
            if scorer is None or ranked.teacher is None or ranked.wanted is None:
                return out
            loss = boundary_loss(
                priority,
                ranked.wanted,
                ranked.teacher,
                self.pairs.sample,
                margin=self.objective.margin,
                balance=self.objective.balance,
            )
            self.boundary.setdefault(layer, loss.detach())
        return with_loss(out, loss, self.factor)

    @torch.no_grad()
    def _compare(
        self,
        layer: int,
        scorer: nn.Module | None,
        query: Tensor,
        key: Tensor,
        scale: float,
        kept: Kept,
        normaliser: Tensor | None,
    ) -> _Ranked:
        """What is kept and what the teacher would keep: once a step, also where a layer is computed twice."""
        split = self.split
        # Without long-range slots there is nothing that a teacher could choose differently.
        if split.long <= 0 or not (self.measure or scorer is not None):
            return _Ranked(kept)
        wanted = self._wanted(scorer, query, key, scale, kept, normaliser)
        if self.measure:
            self._measure(layer, query, key, scale, kept, wanted)
        return _Ranked(kept, wanted, keep(wanted, split.sinks, split.window, self.pairs.long))

    def _wanted(
        self,
        scorer: nn.Module | None,
        query: Tensor,
        key: Tensor,
        scale: float,
        kept: Kept,
        normaliser: Tensor | None = None,
    ) -> Tensor:
        """The teacher's static priority [R, H, S]."""
        kind = self.objective.target
        target = future_target(query, key, scale, self.split.window, self.lengths, kind, kept, normaliser)
        # Teacher and student share the decay.
        return target if scorer is None else _static(scorer, target)

    def _measure(self, layer: int, query: Tensor, key: Tensor, scale: float, kept: Kept, wanted: Tensor) -> None:
        sample, split = self.sample, self.split
        queries = sample.queries[:, None].expand(-1, key.shape[1], -1)
        teacher = keep(wanted, split.sinks, split.window, split.long)
        mine = kept.long(queries)
        self.recall[layer] = sample.mean((mine & teacher.long(queries)).sum(-1) / split.long)
        self.mass[layer] = _retained_mass(query, key, scale, mine, self.split, sample)

    def _decide(self, layer: int, gate: Gate, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention over what gates leave: softly while they are trained, otherwise by their decisions."""
        assert self.gate is not None
        split = self.split
        with torch.autocast(query.device.type, enabled=False):
            keys, values = (key.detach(), value.detach()) if gate.detached else (key, value)
            score = gate(keys.float(), values.float())
        query, key, value = computed_in(query, key, value)
        with torch.autocast(query.device.type, enabled=False):
            kept = Kept.all_but(score <= self.gate.offset, split.sinks, split.window)
            if self.measure and layer not in self.recall:
                with torch.no_grad():
                    self._measure(layer, query, key, scale, kept, self._wanted(None, query, key, scale, kept))
            share = bias = None
            if self.gate.soft:
                closed = self.gate.relax(score, layer, gate.temperature)
                share = relaxed.closed_share(closed, self.lengths, split, self.gate.tokens)
                self.closed[layer] = share.detach()
                bias = relaxed.bias(closed, split)
            else:
                decided = relaxed.leaving(self.lengths, score.shape[-1], split)[:, None]
                self.closed[layer] = (kept.rank * decided).sum() / max(1, self.gate.tokens * key.shape[1])
        if share is None or bias is None:
            return attention_over(query, key, value, kept, scale, self.lengths)[0]
        out = biased_attention(query, key, value, bias, split.window, scale)
        # More closed gates are a smaller loss, as long as too few are closed: that is what the factor says.
        return with_loss(out, -share, self.factor)


@dataclass(frozen=True)
class _Ranked:
    """What one layer keeps, the priorities of the teacher, and what that keeps at the slots of `Pairs`, where it is needed."""

    kept: Kept
    wanted: Tensor | None = None
    teacher: Kept | None = None


@dataclass
class Dense:
    """A forward pass of the teacher: every token sees all earlier ones of its document."""

    documents: Documents | None = None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [R, Hq, S, D], key and value [R, H, S, D] after RoPE -> output [R, Hq, S, D]."""
        if self.documents is not None:
            query, key, value = (self.documents.unpack(tensor) for tensor in (query, key, value))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out if self.documents is None else self.documents.pack(out)


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


@torch.no_grad()
def _retained_mass(query: Tensor, key: Tensor, scale: float, mine: Tensor, split: Split, sample: Sample) -> Tensor:
    """Mean over heads and valid queries of the dense attention weight on kept tokens, a scalar.

    `mine` [R, H, N, S] is what is kept outside sinks and window.
    """
    rows, heads, _, dim = query.shape
    kv_heads, size = key.shape[1], key.shape[2]
    index = sample.queries[:, None, :, None]
    chosen = query.float().gather(2, index.expand(-1, heads, -1, dim))
    logits = chosen.reshape(rows, kv_heads, -1, dim) @ key.float().transpose(-1, -2) * scale
    logits = logits.reshape(rows, kv_heads, heads // kv_heads, -1, size)
    token, at = torch.arange(size, device=key.device), sample.queries[..., None]
    causal = token <= at
    weights = logits.masked_fill(~causal[:, None, None], -torch.inf).softmax(-1)
    seen = mine | (causal & ((token < split.sinks) | (token > at - split.window)))[:, None]
    return sample.mean((weights * seen[:, :, None]).sum(-1).mean(2))
