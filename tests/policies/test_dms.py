from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvbench.core.errors import KvbenchError
from kvbench.core.naive import streamed_sets
from kvbench.core.policy import Geometry, Split, StateRequest, Tokens, kept_share
from kvbench.core.ranking import Kept
from kvbench.engine.generate import Engine
from kvbench.engine.layer import Layer, Step
from kvbench.engine.requests import Request
from kvbench.engine.run import Setting, contact, decode, prefill
from kvbench.engine.score import Passage
from kvbench.kernels.attention import biases
from kvbench.train import relaxed
from kvbench_policies.dms import naive
from kvbench_policies.dms.gate import DmsGate
from kvbench_policies.dms.policy import Dms
from kvbench_policies.dms_topk import naive as naive_topk
from kvbench_policies.dms_topk.policy import DmsTopk
from kvbench_policies.kvpop_mlp.policy import KvpopMlp
from tests.engine.tiny import feed, load, random_scorers, text

GEOMETRY = Geometry(layers=4, query_heads=4, kv_heads=2, head_dim=32)


def trained(policy: Dms, geometry: Geometry = GEOMETRY) -> DmsGate:
    generator = torch.Generator().manual_seed(0)
    gate = policy.scorer(geometry)
    for parameter in gate.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return gate


def tokens(rows: int, size: int) -> Tokens:
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(rows, 2, size, 32, generator=generator) for _ in range(2))
    return Tokens(keys, values, torch.arange(size).expand(rows, size))


def request(policy: Dms, gate: nn.Module | None, budget: int = 64, reference: int = 256) -> StateRequest:
    split = policy.checked_split(budget, GEOMETRY)
    seeds = torch.zeros(2).long()
    return StateRequest(1, 2, GEOMETRY, split, seeds, torch.device("cpu"), gate, reference_length=reference)


def test_gate_equals_naive_with_gradients() -> None:
    gate, given = trained(Dms()), tokens(2, 17)
    weight = torch.randn(2, 2, 17, generator=torch.Generator().manual_seed(5))
    scores = gate(given.keys, given.values)
    torch.autograd.backward((scores * weight).sum())
    weights = {name: parameter.detach().double().requires_grad_() for name, parameter in gate.named_parameters()}
    truth = naive.scores(weights, given.keys, given.values)
    torch.testing.assert_close(scores.detach().double(), truth.detach(), rtol=1e-4, atol=1e-5)
    torch.autograd.backward((truth * weight).sum())
    for name, parameter in gate.named_parameters():
        assert parameter.grad is not None
        wanted = weights[name].grad
        assert wanted is not None
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-3, atol=1e-4)


def test_it_has_the_parameters_of_the_stateless_scorer_and_a_constant_a_head() -> None:
    mine, theirs = (sum(p.numel() for p in policy.scorer(GEOMETRY).parameters()) for policy in (Dms(), KvpopMlp()))
    assert mine == theirs + GEOMETRY.kv_heads


def test_decisions_of_step_and_prefill_agree() -> None:
    policy = Dms()
    gate, given = trained(policy), tokens(2, 40)
    state = policy.state(request(policy, gate))
    found = state.prefill(given)
    # 64 of 256 slots: 44 of 236 tokens outside sinks and window stay.
    offset = math.log((236 - 44) / 44)
    with torch.no_grad():
        scores = gate(given.keys, given.values)
    assert torch.equal(found == -torch.inf, scores <= offset)
    one = Tokens(given.keys[:, :, 7:8], given.values[:, :, 7:8], given.positions[:, 7:8])
    torch.testing.assert_close(state.step(one, one), found[..., 7])
    assert state.tensors() == ()


def test_the_offset_follows_the_share_and_what_was_measured() -> None:
    policy = Dms()
    assert policy.offset(0.5) == 0
    assert policy.offset(0.25) == pytest.approx(math.log(3))
    assert policy.offset(1.0) == -math.inf
    measured = policy.calibrated([(0.5, 1.0), (0.25, -1.0)])
    assert measured.shifts == ((0.25, -1.0), (0.5, 1.0))
    assert measured.offset(0.5) == 1.0
    assert measured.offset(0.375) == pytest.approx(math.log(0.625 / 0.375))
    assert measured.offset(0.1) == pytest.approx(math.log(9) - 1)
    assert Dms(**json.loads(json.dumps(dataclasses.asdict(measured)))) == measured
    assert len({policy, measured, Dms()}) == 2


@pytest.mark.parametrize("wrong", [{"window": 0}, {"sinks": -1}, {"hidden": 0}, {"temperature": 0.0}])
def test_wrong_hyper_parameters_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(KvbenchError, match=next(iter(wrong))):
        Dms(**wrong)  # type: ignore[arg-type] # wrong on purpose


def test_state_without_gate_is_refused() -> None:
    for policy in (Dms(), DmsTopk()):
        with pytest.raises(KvbenchError, match=f"Policy '{policy.name}' needs a trained scorer for layer 1"):
            policy.state(request(policy, None))


@pytest.mark.parametrize("prompt", [1, 30])
def test_the_engine_keeps_what_the_gates_leave(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets in every layer, head and step against the loop, on the keys and values that the engine wrote."""
    written = _recorded(monkeypatch)
    loaded, policy = load(), Dms(sinks=2, window=5)
    scorers = random_scorers(policy, loaded.geometry)
    assert scorers is not None
    ids = text(1, 60)
    trace = feed(loaded, policy, 30, ids, prompt, scorers)
    offset = policy.offset(kept_share(policy.split(30, loaded.geometry), 60))
    dropped = 0
    for layer, one in enumerate(trace.layers):
        keys, values = (torch.cat(parts, 2) for parts in zip(*written[one], strict=True))
        with torch.no_grad():
            scores = scorers[layer](keys, values)
        # What was emptied was filled again: no more slots were used than tokens were held at once, a prompt's all among them.
        most = max(len(sets[layer][0][head]) for sets in trace.kept for head in range(scores.shape[1]))
        used = int((one.slots.keys != 0).any(-1).any(1).nonzero()[:, 1].max()) + 1
        assert used <= max(most, prompt) < 60
        # And tokens lie in the first slots of each head.
        held = one.slots.positions >= 0
        assert torch.equal(held, held.sort(descending=True).values)
        for head in range(scores.shape[1]):
            wanted = naive.streamed_sets(scores[0, head].tolist(), offset, 2, 5)
            for place, sets in enumerate(trace.kept, start=prompt - 1):
                assert sets[layer][0][head] == wanted[place]
            dropped += 60 - len(wanted[-1])
    assert 0 < dropped < 60 * 4


def test_a_row_that_has_ended_takes_no_further_slots() -> None:
    """It feeds its last token again for as long as others go on."""
    loaded, policy = load(), Dms(sinks=2, window=5)
    scorers = random_scorers(policy, loaded.geometry)
    ids = text(2, 40)
    setting = Setting(loaded, policy, policy.split(30, loaded.geometry), scorers, 40, 40)
    layers = setting.layers(2, torch.arange(2))
    with torch.inference_mode(), contact(loaded):
        prefill(setting, layers, ids[:, :10])
        before = [layer.slots.positions[1].clone() for layer in layers]
        for place in range(10, 40):
            now = torch.stack([ids[0, place], ids[1, 9]])
            decode(loaded, layers, now, Step(torch.tensor([place, 9]), 10, place + 1))
    assert all(torch.equal(layer.slots.positions[1], held) for layer, held in zip(layers, before, strict=True))


def _recorded(monkeypatch: pytest.MonkeyPatch) -> dict[Layer, list[tuple[Tensor, Tensor]]]:
    """Keys and values [R, H, T, D] as layers write them, in order."""
    written: dict[Layer, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    fill, write = Layer._prefill_freely, Layer._write

    def filled(self: Layer, query: Tensor, tokens: Tokens, *rest: Any) -> Tensor:
        written[self].append((tokens.keys, tokens.values))
        return fill(self, query, tokens, *rest)

    def wrote(self: Layer, place: Tensor, key: Tensor, value: Tensor, positions: Tensor, ring: Tensor) -> None:
        written[self].append((key, value))
        write(self, place, key, value, positions, ring)

    monkeypatch.setattr(Layer, "_prefill_freely", filled)
    monkeypatch.setattr(Layer, "_write", wrote)
    return written


def test_audit_counts_what_is_left() -> None:
    loaded, policy = load(), Dms(sinks=2, window=5)
    scorers = random_scorers(policy, loaded.geometry)
    requests = [Request(tuple(text(1, size)[0].tolist()), 30) for size in (12, 40)]
    audit = Engine(loaded, policy, 20, scorers, rows=2).generate(requests).audit
    assert audit.slots == 70
    assert len(audit.head_entries) == 2
    assert all(len(layer) == 2 for layer in audit.head_entries)
    flat = [entries for layer in audit.head_entries for entries in layer]
    assert audit.entries_mean == pytest.approx(sum(flat) / 4)
    assert 7 < sum(flat) / 4 < audit.peak <= 70
    assert audit.evictions > 0


def test_scored_tokens_enter_whole_or_one_by_one() -> None:
    loaded, policy = load(), Dms(sinks=2, window=5)
    scorers = random_scorers(policy, loaded.geometry)
    passages = [Passage(tuple(text(1, size)[0].tolist())) for size in (50, 31)]
    engine = Engine(loaded, policy, 20, scorers, rows=2)
    exact, single, chunks = (engine.score(passages, chunk) for chunk in (None, 1, 4))
    assert (exact.feeding, single.feeding, chunks.feeding) == ("exact", "token", "chunks of 4")
    for one, other in zip(exact.scores, single.scores, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert exact.audit.head_entries == single.audit.head_entries
    # What leaves while a chunk enters is gone for the whole chunk, so that later layers decide a little differently.
    assert exact.audit.evictions > 0
    assert chunks.audit.cr_end == pytest.approx(exact.audit.cr_end, abs=0.02)
    with pytest.raises(KvbenchError, match="between 1 and 5 tokens at once"):
        engine.score(passages, 6)


def test_ranking_by_gates_keeps_the_running_top_k() -> None:
    scores = torch.randn(50).round(decimals=1)
    kept = Kept.of(scores, 3, 6, 9).mask()
    slow = naive_topk.streamed_sets(scores.tolist(), 3, 6, 9)
    assert slow == streamed_sets(scores.tolist(), 3, 6, 9)
    assert [set(row.nonzero()[:, 0].tolist()) for row in kept] == slow


# Training


def _gate_step(offset: float = 0.4, soft: bool = True) -> relaxed.GateStep:
    return relaxed.GateStep(offset, soft, 7, torch.arange(3), 100)


def test_relaxation_is_the_logistic_of_the_papers_two_gumbels() -> None:
    scores = torch.zeros(3, 2, 4000)
    closed = _gate_step(0.4).relax(scores, 1, 0.5)
    # Hard decisions: each with the probability that the offset names.
    assert (closed > 0).float().mean().item() == pytest.approx(1 / (1 + math.exp(-0.4)), abs=0.01)
    noise = closed * 0.5 - 0.4
    # A logistic number has variance pi^2 / 3, as the difference of two Gumbels.
    assert noise.var().item() == pytest.approx(math.pi**2 / 3, rel=0.05)
    uniform = noise.sigmoid()
    for token in (0, 17):
        wanted = naive.closed(0.0, 0.4, float(uniform[0, 0, token]), 0.5)
        assert closed[0, 0, token].sigmoid().item() == pytest.approx(wanted, rel=1e-3)


def test_noise_belongs_to_row_layer_head_and_token() -> None:
    scores = torch.zeros(3, 2, 20)
    whole = _gate_step().relax(scores, 1, 1.0)
    alone = dataclasses.replace(_gate_step(), names=torch.tensor([2])).relax(scores[:1], 1, 1.0)
    assert torch.equal(whole[2:], alone)
    assert torch.equal(whole[..., :9], _gate_step().relax(scores[..., :9], 1, 1.0))
    assert not torch.equal(whole, _gate_step().relax(scores, 0, 1.0))
    assert len(set(whole.flatten().tolist())) == whole.numel()


def test_bias_is_log_open_outside_sinks_and_window() -> None:
    split, closed = Split(slots=9, sinks=2, window=3), torch.randn(1, 2, 12)
    found = biases(relaxed.bias(closed, split), split.window)
    for head in range(2):
        for query in range(12):
            for key in range(12):
                wanted = -math.inf if key > query else 0.0
                if 2 <= key <= query - 3:
                    wanted = math.log(1 - float(closed[0, head, key].double().sigmoid()))
                assert found[0, head, query, key].item() == pytest.approx(wanted, abs=1e-5)


def test_closed_share_counts_hard_decisions_and_has_the_soft_gradient() -> None:
    split = Split(slots=9, sinks=2, window=3)
    closed = torch.randn(2, 2, 12, requires_grad=True)
    lengths = torch.tensor([12, 7])
    decided = torch.zeros(2, 2, 12)
    decided[0, :, 2:9] = 1
    decided[1, :, 2:4] = 1
    share = relaxed.closed_share(closed, lengths, split, 9)
    assert share.item() == pytest.approx(float(((closed > 0) * decided).sum()) / 18)
    torch.autograd.backward(share)
    wanted: Tensor = closed.detach().sigmoid() * (1 - closed.detach().sigmoid()) * decided / 18
    assert closed.grad is not None
    torch.testing.assert_close(closed.grad, wanted)


def test_the_ratio_rises_linearly_to_the_budgets() -> None:
    assert relaxed.target_share(0.25, 0.0, 0.5) == 0
    assert relaxed.target_share(0.25, 0.25, 0.5) == pytest.approx(1 - 1 / 2.5)
    assert relaxed.target_share(0.25, 0.5, 0.5) == relaxed.target_share(0.25, 1.0, 0.5) == pytest.approx(0.75)
    assert relaxed.target_share(0.25, 0.1, 0.0) == pytest.approx(0.75)
