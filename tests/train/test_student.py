from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvbench.core import naive
from kvbench.core.policy import Scorer, Split
from kvbench.models.source import LoadedModel
from kvbench.train import student
from kvbench.train.losses import Sample, distillation, sample_queries
from kvbench.train.target import future_target

SPLIT = Split(slots=20, sinks=2, window=6)


class Linear(Scorer):
    """A scorer that has something to learn."""

    def __init__(self, heads: int, dim: int, decay: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, 1, 2 * dim))
        self.decay = decay

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        return (torch.cat((keys, values), -1) * self.weight).sum(-1)

    def log_decay(self) -> Tensor:
        return torch.full((self.weight.shape[0],), -self.decay)


def _scorers(loaded: LoadedModel, decay: float = 0.0) -> nn.ModuleList:
    geometry = loaded.geometry
    return nn.ModuleList(Linear(geometry.kv_heads, geometry.head_dim, decay) for _ in range(geometry.layers))


def _step(lengths: Tensor, scorers: nn.ModuleList | None, split: Split = SPLIT, **more: Any) -> student.Step:
    first = split.sinks + split.window + split.long
    sample = sample_queries(lengths, first, 10, 32, torch.Generator().manual_seed(0))
    return student.Step(
        split=split, lengths=lengths, sample=sample, pairs=sample, pairs_long=split.long, scorers=scorers, **more
    )


def _ids(lengths: Tensor) -> Tensor:
    ids = torch.randint(4, 40, (len(lengths), int(lengths.max())))
    return ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], 0)


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_each_layer_sees_what_streaming_keeps(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, decay: float) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    priorities: list[Tensor] = []
    attention, priority = student.masked_attention, student.student_priority

    def spy_priority(scorer: nn.Module | None, key: Tensor, value: Tensor) -> Tensor:
        priorities.append(priority(scorer, key, value))
        return priorities[-1]

    def spy_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, scale: float) -> Tensor:
        seen.append((keep, query))
        return attention(query, key, value, keep, scale)

    monkeypatch.setattr(student, "student_priority", spy_priority)
    monkeypatch.setattr(student, "masked_attention", spy_attention)
    tiny.model.set_attn_implementation(student.NAME)
    lengths = torch.tensor([70, 45])
    tiny.model(input_ids=_ids(lengths), use_cache=False, kvbench_step=_step(lengths, _scorers(tiny, decay)))
    assert len(seen) == len(priorities) == 2
    for (keep, _), values in zip(seen, priorities, strict=True):
        for row, length in enumerate(lengths.tolist()):
            for head in range(2):
                wanted = naive.streamed_sets(values[row, head, :length].tolist(), SPLIT.sinks, SPLIT.window, SPLIT.long)
                for query, tokens in enumerate(wanted):
                    assert set(keep[row, head, query].nonzero()[:, 0].tolist()) == tokens


def test_attention_under_a_full_mask_is_causal_attention() -> None:
    query, key, value = torch.randn(2, 6, 9, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    keep = torch.ones(2, 2, 9, 9, dtype=torch.bool).tril()
    wanted = nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), is_causal=True, scale=0.4
    )
    torch.testing.assert_close(student.masked_attention(query, key, value, keep, 0.4), wanted)


def test_attention_masks_each_kv_head_for_its_own_group() -> None:
    query, key, value = torch.randn(2, 6, 9, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    keep = (torch.rand(2, 2, 9, 9) < 0.5).tril() | torch.eye(9, dtype=torch.bool)
    logits = torch.einsum("rhqd,rhkd->rhqk", query, key.repeat_interleave(3, 1)) * 0.4
    weights = logits.masked_fill(~keep.repeat_interleave(3, 1), -torch.inf).softmax(-1)
    wanted = weights @ value.repeat_interleave(3, 1)
    torch.testing.assert_close(student.masked_attention(query, key, value, keep, 0.4), wanted)


def test_a_budget_for_everything_is_the_dense_model(tiny: LoadedModel) -> None:
    lengths = torch.tensor([40])
    ids = _ids(lengths)
    wanted = tiny.model(input_ids=ids, use_cache=False).logits
    tiny.model.set_attn_implementation(student.NAME)
    step = _step(lengths, _scorers(tiny), Split(slots=40, sinks=2, window=6), measure=True)
    torch.testing.assert_close(tiny.model(input_ids=ids, use_cache=False, kvbench_step=step).logits, wanted)
    # No query evicts anything, so there is nothing to learn.
    assert all(loss.item() == 0 for loss in step.boundary.values())


def test_without_scorers_the_mask_is_sinks_and_recency(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor] = []
    attention = student.masked_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, scale: float) -> Tensor:
        masks.append(keep)
        return attention(query, key, value, keep, scale)

    monkeypatch.setattr(student, "masked_attention", spy)
    tiny.model.set_attn_implementation(student.NAME)
    lengths = torch.tensor([50])
    token = torch.arange(50)
    recent = token > token[:, None] - (SPLIT.slots - SPLIT.sinks)
    wanted = (token <= token[:, None]) & ((token < SPLIT.sinks) | recent)
    for split in (SPLIT, Split(slots=20, sinks=2, window=18)):
        step = _step(lengths, None, split)
        tiny.model(input_ids=_ids(lengths), use_cache=False, kvbench_step=step)
        assert not step.boundary
        assert (masks[-1] == wanted).all()


def test_distillation_reaches_the_lm_only_and_the_boundary_loss_the_scorers_only(tiny: LoadedModel) -> None:
    model = tiny.model.requires_grad_(True)
    lengths = torch.tensor([60, 50])
    ids = _ids(lengths)
    with torch.no_grad():
        teacher = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation(student.NAME)
    scorers = _scorers(tiny)
    step = _step(lengths, scorers)
    logits = model(input_ids=ids, use_cache=False, kvbench_step=step).logits
    lm, scoring = list(model.parameters()), list(scorers.parameters())
    kl = distillation(logits, teacher, torch.ones_like(ids, dtype=torch.bool))
    boundary = torch.stack(list(step.boundary.values())).mean()
    assert kl > 0
    assert boundary > 0
    assert all(grad is None for grad in torch.autograd.grad(kl, scoring, retain_graph=True, allow_unused=True))
    assert all(grad is None for grad in torch.autograd.grad(boundary, lm, retain_graph=True, allow_unused=True))
    for loss, parameters in ((kl, lm), (boundary, scoring)):
        for grad in torch.autograd.grad(loss, parameters, retain_graph=True):
            assert grad.abs().sum() > 0


@pytest.mark.parametrize("sparse", [False, True])
def test_what_shares_a_batch_does_not_matter(tiny: LoadedModel, sparse: bool) -> None:
    tiny.model.set_attn_implementation(student.NAME)
    scorers = _scorers(tiny)
    lengths = torch.tensor([70, 48, 55])
    ids = _ids(lengths)
    together = _step(lengths, scorers, measure=True, sparse_normaliser=sparse)
    logits = tiny.model(input_ids=ids, use_cache=False, kvbench_step=together).logits
    single = []
    for row, length in enumerate(lengths.tolist()):
        step = _step(lengths[row : row + 1], scorers, measure=True, sparse_normaliser=sparse)
        step.sample = Sample(together.sample.queries[row : row + 1], together.sample.valid[row : row + 1])
        step.pairs = step.sample
        alone = tiny.model(input_ids=ids[row : row + 1, :length], use_cache=False, kvbench_step=step).logits
        torch.testing.assert_close(logits[row, :length], alone[0], atol=1e-4, rtol=1e-4)
        single.append(step)
    for layer in range(2):
        for name in ("boundary", "recall", "mass"):
            mean = torch.stack([getattr(step, name)[layer] for step in single]).mean()
            torch.testing.assert_close(getattr(together, name)[layer], mean, atol=1e-4, rtol=1e-4)


def test_recall_and_mass_by_hand(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[Tensor, Tensor, Tensor, float]] = []
    attention = student.masked_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, scale: float) -> Tensor:
        captured.append((query, key, keep, scale))
        return attention(query, key, value, keep, scale)

    monkeypatch.setattr(student, "masked_attention", spy)
    tiny.model.set_attn_implementation(student.NAME)
    lengths = torch.tensor([64])
    step = _step(lengths, _scorers(tiny), measure=True)
    with torch.no_grad():
        tiny.model(input_ids=_ids(lengths), use_cache=False, kvbench_step=step)
    for layer, (query, key, keep, scale) in enumerate(captured):
        mass = naive.future_mass(query[0], key[0], scale, SPLIT.window)
        wanted = future_target(query, key, scale, SPLIT.window, lengths)[0]
        torch.testing.assert_close(mass.view(2, 2, -1).amax(1)[:, :58].float(), wanted[:, :58], atol=1e-3, rtol=1e-3)
        recalls, kept_mass = [], []
        logits = (query[0] @ key[0].repeat_interleave(2, 0).mT * scale).masked_fill(
            ~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf
        )
        weights = logits.softmax(-1)
        for head in range(2):
            sets = naive.streamed_sets(wanted[head].tolist(), SPLIT.sinks, SPLIT.window, SPLIT.long)
            for q in step.sample.queries[0].tolist():
                far = set(range(SPLIT.sinks, q - SPLIT.window + 1))
                mine = set(keep[0, head, q].nonzero()[:, 0].tolist())
                recalls.append(len(sets[q] & mine & far) / SPLIT.long)
                for group in range(2):
                    kept_mass.append(float(weights[2 * head + group, q][keep[0, head, q]].sum()))
        assert step.recall[layer].item() == pytest.approx(sum(recalls) / len(recalls), abs=1e-5)
        assert step.mass[layer].item() == pytest.approx(sum(kept_mass) / len(kept_mass), abs=1e-5)


def test_a_fresh_model_is_not_changed_by_another_ones_training_attention(
    make_tiny: Callable[[], LoadedModel],
) -> None:
    other = make_tiny()
    other.model.set_attn_implementation(student.NAME)
    assert make_tiny().model.config._attn_implementation == "sdpa"
