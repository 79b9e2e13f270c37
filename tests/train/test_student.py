from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvbench.core import naive
from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Scorer, Split
from kvbench.core.ranking import Kept
from kvbench.kernels.attention import attention_over
from kvbench.models.source import LoadedModel
from kvbench.train import relaxed, student
from kvbench.train.attached import NAME, attach, compute_twice, is_scorer, split_apart
from kvbench.train.distill import divergence
from kvbench.train.documents import Documents
from kvbench.train.losses import Pairs, Sample, boundary_loss, sample_queries
from kvbench.train.target import TargetKind, future_target
from kvbench_policies.dms.policy import Dms
from kvbench_policies.kvpop.policy import Kvpop

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


def _attach(loaded: LoadedModel, scorers: bool = True, decay: float = 0.0) -> nn.ModuleList:
    """Puts scorers into the model and switches it to the student's attention."""
    geometry = loaded.geometry
    modules = nn.ModuleList(Linear(geometry.kv_heads, geometry.head_dim, decay) for _ in range(geometry.layers))
    attach(loaded, loaded.model, modules if scorers else None)
    loaded.model.set_attn_implementation(NAME)
    return modules


def _step(lengths: Tensor, split: Split = SPLIT, **more: Any) -> student.Step:
    first = split.sinks + split.window + split.long
    sample = sample_queries(lengths, first, 10, 32, torch.Generator().manual_seed(0))
    return student.Step(split=split, lengths=lengths, sample=sample, pairs=Pairs(sample, split.long), **more)


def _ids(lengths: Tensor) -> Tensor:
    ids = torch.randint(4, 40, (len(lengths), int(lengths.max())))
    return ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], 0)


def _masks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor, float]]:
    """Query, key, mask and scale of every attention from now on."""
    seen: list[tuple[Tensor, Tensor, Tensor, float]] = []

    def spy(
        query: Tensor, key: Tensor, value: Tensor, kept: Kept, scale: float, lengths: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        seen.append((query, key, kept.mask(), scale))
        return attention_over(query, key, value, kept, scale, lengths)

    monkeypatch.setattr(student, "attention_over", spy)
    return seen


def _priorities(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    found: list[Tensor] = []
    priority = student.student_priority

    def spy(scorer: nn.Module | None, key: Tensor, value: Tensor) -> Tensor:
        found.append(priority(scorer, key, value))
        return found[-1]

    monkeypatch.setattr(student, "student_priority", spy)
    return found


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_each_layer_sees_what_streaming_keeps(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, decay: float) -> None:
    seen, priorities = _masks(monkeypatch), _priorities(monkeypatch)
    _attach(tiny, decay=decay)
    lengths = torch.tensor([70, 45])
    tiny.model(input_ids=_ids(lengths), use_cache=False, kvbench_step=_step(lengths))
    assert len(seen) == len(priorities) == 2
    for (_, _, keep, _), values in zip(seen, priorities, strict=True):
        for row, length in enumerate(lengths.tolist()):
            for head in range(2):
                wanted = naive.streamed_sets(values[row, head, :length].tolist(), SPLIT.sinks, SPLIT.window, SPLIT.long)
                for query, tokens in enumerate(wanted):
                    assert set(keep[row, head, query].nonzero()[:, 0].tolist()) == tokens


def test_a_budget_for_everything_is_the_dense_model(tiny: LoadedModel) -> None:
    lengths = torch.tensor([40])
    ids = _ids(lengths)
    wanted = tiny.model(input_ids=ids, use_cache=False).logits
    _attach(tiny)
    step = _step(lengths, Split(slots=40, sinks=2, window=6), measure=True)
    torch.testing.assert_close(tiny.model(input_ids=ids, use_cache=False, kvbench_step=step).logits, wanted)
    dense = tiny.model(input_ids=ids, use_cache=False, kvbench_step=student.Dense()).logits
    torch.testing.assert_close(dense, wanted)
    # No query evicts anything, so there is nothing to learn.
    assert all(loss.item() == 0 for loss in step.boundary.values())


def test_without_scorers_the_mask_is_sinks_and_recency(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _masks(monkeypatch)
    _attach(tiny, scorers=False)
    lengths = torch.tensor([50])
    token = torch.arange(50)
    recent = token > token[:, None] - (SPLIT.slots - SPLIT.sinks)
    wanted = (token <= token[:, None]) & ((token < SPLIT.sinks) | recent)
    for split in (SPLIT, Split(slots=20, sinks=2, window=18)):
        step = _step(lengths, split)
        tiny.model(input_ids=_ids(lengths), use_cache=False, kvbench_step=step)
        assert not step.boundary
        assert (seen[-1][2] == wanted).all()


def _gradients(
    model: nn.Module, ids: Tensor, teacher: Tensor, step: student.Step, kl: bool = True
) -> dict[str, Tensor]:
    """Of the KL (or nothing) and the attached losses."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, kvbench_step=step).logits
    torch.autograd.backward(divergence(logits, teacher).mean() * (1.0 if kl else 0.0))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_distillation_reaches_the_lm_only_and_the_boundary_loss_the_scorers_only(tiny: LoadedModel) -> None:
    lengths = torch.tensor([60, 50])
    ids = _ids(lengths)
    teacher = tiny.model(input_ids=ids, use_cache=False).logits
    _attach(tiny)
    model = tiny.model.requires_grad_(True)
    off, on, double = (
        _gradients(model, ids, teacher, _step(lengths, factor=torch.tensor(factor))) for factor in (0.0, 1.0, 2.0)
    )
    alone = _gradients(model, ids, teacher, _step(lengths), kl=False)
    for name, grad in on.items():
        if is_scorer(name):
            assert grad.abs().sum() > 0
            assert not off[name].any()
            torch.testing.assert_close(double[name], 2 * grad)
            torch.testing.assert_close(alone[name], grad)
        else:
            assert grad.abs().sum() > 0
            assert torch.equal(off[name], grad)
            assert not alone[name].any()


def test_an_attached_loss_is_the_sum_of_the_layers_losses(tiny: LoadedModel) -> None:
    """The gradient of scorers by autograd on the losses themselves, kept with their graphs."""
    lengths = torch.tensor([60, 50])
    ids = _ids(lengths)
    scorers = _attach(tiny)
    kept: list[Tensor] = []

    def keep(*given: Any, **more: Any) -> Tensor:
        kept.append(boundary_loss(*given, **more))
        return kept[-1]

    teacher = torch.randn(2, 60, tiny.model.config.vocab_size)
    model = tiny.model.requires_grad_(True)
    attached_grads = _gradients(model, ids, teacher, _step(lengths, factor=torch.tensor(0.5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(student, "boundary_loss", keep)
        model(input_ids=ids, use_cache=False, kvbench_step=_step(lengths))
    direct = torch.autograd.grad(0.5 * torch.stack(kept).sum(), list(scorers.parameters()))
    names = [name for name, _ in model.named_parameters() if is_scorer(name)]
    for name, wanted in zip(names, direct, strict=True):
        torch.testing.assert_close(attached_grads[name], wanted)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_layers_that_are_computed_twice_count_once(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, gates: bool, sparse: bool
) -> None:
    lengths = torch.tensor([60, 50])
    ids = _ids(lengths)
    teacher = tiny.model(input_ids=ids, use_cache=False).logits
    if gates:
        policy = Dms()
        modules = nn.ModuleList(policy.scorer(tiny.geometry) for _ in range(2))
        for parameter in modules.parameters():
            nn.init.normal_(parameter)
        attach(tiny, tiny.model, modules)
        tiny.model.set_attn_implementation(NAME)
    else:
        _attach(tiny)
    targets: list[Tensor] = []

    def counted(*given: Any) -> Tensor:
        targets.append(future_target(*given))
        return targets[-1]

    monkeypatch.setattr(student, "future_target", counted)
    model = tiny.model.requires_grad_(True).train()

    def gradients() -> dict[str, Tensor]:
        targets.clear()
        gate = relaxed.GateStep(0.3, True, 5, torch.arange(2), 94) if gates else None
        objective = student.Objective(TargetKind("sparse" if sparse else "dense"))
        step = _step(lengths, objective=objective, gate=gate, factor=torch.tensor(0.7))
        grads = _gradients(model, ids, teacher, step)
        # What is kept and what the teacher would keep is decided once.
        assert len(targets) == (0 if gates else 2)
        assert len(step.closed if gates else step.boundary) == 2
        return grads

    plain = gradients()
    compute_twice(model)
    again = gradients()
    assert plain.keys() == again.keys()
    for name, grad in plain.items():
        assert grad.abs().sum() > 0
        torch.testing.assert_close(again[name], grad)


@pytest.mark.parametrize("sparse", [False, True])
def test_what_shares_a_batch_does_not_matter(tiny: LoadedModel, sparse: bool) -> None:
    _attach(tiny)
    lengths = torch.tensor([70, 48, 55])
    ids = _ids(lengths)
    objective = student.Objective(TargetKind("sparse" if sparse else "dense"))
    together = _step(lengths, measure=True, objective=objective)
    logits = tiny.model(input_ids=ids, use_cache=False, kvbench_step=together).logits
    single = []
    for row, length in enumerate(lengths.tolist()):
        step = _step(lengths[row : row + 1], measure=True, objective=objective)
        step.sample = Sample(together.sample.queries[row : row + 1], together.sample.valid[row : row + 1], 32)
        step.pairs = Pairs(step.sample, SPLIT.long)
        alone = tiny.model(input_ids=ids[row : row + 1, :length], use_cache=False, kvbench_step=step).logits
        torch.testing.assert_close(logits[row, :length], alone[0], atol=1e-4, rtol=1e-4)
        single.append(step)
    for layer in range(2):
        for name in ("boundary", "recall", "mass"):
            mean = torch.stack([getattr(step, name)[layer] for step in single]).mean()
            torch.testing.assert_close(getattr(together, name)[layer], mean, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlstm", "gate"])
def test_documents_of_a_packed_row_are_rows_of_their_own(tiny: LoadedModel, kind: str) -> None:
    """Attention reset at borders: logits, losses, sets and gradients are those of padded single documents."""
    borders = torch.tensor([[0, 0, 70], [0, 70, 100], [0, 100, 128], [1, 0, 45], [1, 45, 128]])
    sizes = borders[:, 2] - borders[:, 1]
    packed_ids = torch.randint(4, 40, (2, 128))
    single_ids = torch.zeros(5, int(sizes.max()), dtype=torch.int64)
    for document, (row, start, stop) in enumerate(borders.tolist()):
        single_ids[document, : stop - start] = packed_ids[row, start:stop]
    inside = torch.arange(single_ids.shape[1]) < sizes[:, None]

    policies = {"linear": None, "mlstm": Kvpop(window=6), "gate": Dms(window=6)}
    if (policy := policies[kind]) is None:
        _attach(tiny)
    else:
        modules = nn.ModuleList(policy.scorer(tiny.geometry) for _ in range(2))
        for parameter in modules.parameters():
            nn.init.normal_(parameter, std=0.5)
        attach(tiny, tiny.model, modules)
        tiny.model.set_attn_implementation(NAME)
    model = tiny.model.requires_grad_(True)
    leaving = int((sizes - SPLIT.window - SPLIT.sinks).sum())

    def step(**more: Any) -> student.Step:
        gate = relaxed.GateStep(0.1, True, 3, torch.arange(5), leaving) if kind == "gate" else None
        return _step(sizes, gate=gate, measure=True, **more)

    documents = Documents.of(borders, 2, 128)
    packed, single = step(documents=documents), step()
    one = model(
        input_ids=packed_ids, position_ids=documents.positions, use_cache=False, kvbench_step=packed
    ).logits.reshape(256, -1)
    two = model(input_ids=single_ids, use_cache=False, kvbench_step=single).logits
    flat = torch.cat([one[row * 128 + start : row * 128 + stop] for row, start, stop in borders.tolist()])
    torch.testing.assert_close(flat, two[inside], atol=1e-4, rtol=1e-4)
    dense = model(
        input_ids=packed_ids, position_ids=documents.positions, use_cache=False, kvbench_step=student.Dense(documents)
    ).logits.reshape(256, -1)
    apart = model(input_ids=single_ids, use_cache=False, kvbench_step=student.Dense()).logits
    flat_dense = torch.cat([dense[row * 128 + start : row * 128 + stop] for row, start, stop in borders.tolist()])
    torch.testing.assert_close(flat_dense, apart[inside], atol=1e-4, rtol=1e-4)
    for name in ("boundary", "recall", "mass", "closed"):
        mine, theirs = getattr(packed, name), getattr(single, name)
        assert mine.keys() == theirs.keys()
        for layer in mine:
            torch.testing.assert_close(mine[layer], theirs[layer], atol=1e-4, rtol=1e-4)
    parameters = list(model.parameters())
    weight = torch.randn(flat.shape)
    for mine, theirs in zip(
        torch.autograd.grad((flat * weight).sum(), parameters),
        torch.autograd.grad((two[inside] * weight).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=2e-3)


def test_recall_and_mass_by_hand(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = _masks(monkeypatch)
    _attach(tiny)
    lengths = torch.tensor([64])
    step = _step(lengths, measure=True)
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


def test_scorers_lie_in_their_layers_and_come_apart_again(tiny: LoadedModel) -> None:
    geometry = tiny.geometry
    before = {name: value.clone() for name, value in tiny.model.named_parameters()}
    scorers = nn.ModuleList(Linear(geometry.kv_heads, geometry.head_dim) for _ in range(geometry.layers))
    plain = {name: value.clone() for name, value in scorers.state_dict().items()}
    prefixes = attach(tiny, tiny.model, scorers)
    assert prefixes == [f"model.layers.{layer}.self_attn.kvbench_scorer." for layer in range(2)]
    lm, apart = split_apart(dict(tiny.model.named_parameters()), prefixes)
    assert lm.keys() == before.keys()
    assert apart.keys() == plain.keys()
    assert all(torch.equal(apart[name], plain[name]) for name in plain)


def test_a_model_that_caps_its_logits_is_refused(tiny: LoadedModel) -> None:
    plain = tiny.model.forward

    def capped(*given: Any, **more: Any) -> Any:
        output = plain(*given, **more)
        output.logits = output.logits.tanh()
        return output

    tiny.model.forward = capped
    with pytest.raises(KvbenchError, match="scales or caps its logits after the output head"):
        attach(tiny, tiny.model, None)


def test_a_fresh_model_is_not_changed_by_another_ones_training_attention(
    make_tiny: Callable[[], LoadedModel],
) -> None:
    other = make_tiny()
    other.model.set_attn_implementation(NAME)
    assert make_tiny().model.config._attn_implementation == "sdpa"


def test_the_boundary_loss_imagines_the_slots_of_its_pairs(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, priorities = _masks(monkeypatch), _priorities(monkeypatch)
    _attach(tiny)
    lengths = torch.tensor([60, 50])
    sample = sample_queries(lengths, SPLIT.sinks + SPLIT.window + 3, 10, 32, torch.Generator().manual_seed(5))
    step = _step(lengths)
    step.pairs = Pairs(sample, 3)
    with torch.no_grad():
        tiny.model(input_ids=_ids(lengths), use_cache=False, kvbench_step=step)
        for layer, (query, key, keep, scale) in enumerate(captured):
            wanted, priority = future_target(query, key, scale, SPLIT.window, lengths), priorities[layer]
            teacher = Kept.of(wanted, SPLIT.sinks, SPLIT.window, 3)
            torch.testing.assert_close(step.boundary[layer], boundary_loss(priority, wanted, teacher, sample))
            # The attention itself is that of the budget.
            mine = Kept.of(priority, SPLIT.sinks, SPLIT.window, SPLIT.long)
            assert torch.equal(keep, mine.mask())
