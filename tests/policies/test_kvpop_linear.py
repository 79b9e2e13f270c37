from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Geometry, StateRequest, Tokens
from kvbench_policies.kvpop_linear import naive
from kvbench_policies.kvpop_linear.policy import KvpopLinear
from kvbench_policies.kvpop_linear.scorer import LinearScorer

GEOMETRY = Geometry(layers=4, query_heads=4, kv_heads=2, head_dim=32)


def trained(policy: KvpopLinear) -> LinearScorer:
    generator = torch.Generator().manual_seed(0)
    scorer = policy.scorer(GEOMETRY)
    for parameter in scorer.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return scorer


def tokens(rows: int, size: int) -> Tokens:
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(rows, 2, size, 32, generator=generator) for _ in range(2))
    return Tokens(keys, values, torch.arange(size).expand(rows, size))


def request(scorer: torch.nn.Module | None, rows: int = 2) -> StateRequest:
    split = KvpopLinear().checked_split(64, GEOMETRY)
    return StateRequest(1, rows, GEOMETRY, split, torch.zeros(rows).long(), torch.device("cpu"), scorer)


@pytest.mark.parametrize("size", [1, 5, 33])
def test_scorer_equals_naive_with_gradients(size: int) -> None:
    scorer, given = trained(KvpopLinear()), tokens(2, size)
    weight = torch.randn(2, 2, size, generator=torch.Generator().manual_seed(5))
    scores = scorer(given.keys, given.values)
    torch.autograd.backward((scores * weight).sum())
    weights = {name: parameter.detach().double().requires_grad_() for name, parameter in scorer.named_parameters()}
    truth = naive.scores(weights, given.keys, given.values)
    torch.testing.assert_close(scores.detach().double(), truth.detach(), rtol=1e-4, atol=1e-5)
    torch.autograd.backward((truth * weight).sum())
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None
        wanted = weights[name].grad
        assert wanted is not None
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("decay", ["none", "fixed", "learned"])
def test_step_prefill_and_forward_agree(decay: str) -> None:
    policy = KvpopLinear(decay=decay)  # type: ignore[arg-type] # literals from parametrize
    scorer, given = trained(policy), tokens(2, 40)
    with torch.no_grad():
        wanted = scorer.priority(scorer(given.keys, given.values), given.positions)
    state = policy.state(request(scorer))
    torch.testing.assert_close(state.prefill(given), wanted, rtol=1e-5, atol=1e-6)
    for now in (16, 39):
        new, leaving = (
            Tokens(given.keys[:, :, at : at + 1], given.values[:, :, at : at + 1], given.positions[:, at : at + 1])
            for at in (now, now - 16)
        )
        torch.testing.assert_close(state.step(new, leaving), wanted[..., now - 16], rtol=1e-4, atol=1e-5)
    assert state.tensors() == ()


def test_score_depends_on_its_own_token_only() -> None:
    scorer, given = trained(KvpopLinear()), tokens(1, 30)
    alone = scorer(given.keys[:, :, 7:8], given.values[:, :, 7:8])
    torch.testing.assert_close(scorer(given.keys, given.values)[..., 7:8], alone, rtol=1e-5, atol=1e-6)


def test_untrained_scores_are_all_equal_and_bf16_is_scored_in_fp32() -> None:
    given = tokens(2, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores: Tensor = KvpopLinear().scorer(GEOMETRY)(given.keys.bfloat16(), given.values.bfloat16())
    assert scores.dtype == torch.float32
    assert not bool(scores.any())


def test_budget_below_the_smallest_is_refused_with_the_number() -> None:
    split = KvpopLinear().checked_split(21, GEOMETRY)
    assert (split.slots, split.long, split.charged) == (21, 1, 0)
    with pytest.raises(KvbenchError, match="at least 21 slots; this one has 20"):
        KvpopLinear().checked_split(20, GEOMETRY)


def test_policy_is_hashable_and_json() -> None:
    assert len({KvpopLinear(), KvpopLinear(), KvpopLinear(window=8)}) == 2
    assert KvpopLinear(**json.loads(json.dumps(dataclasses.asdict(KvpopLinear(sinks=8))))) == KvpopLinear(sinks=8)


@pytest.mark.parametrize("wrong", [{"window": 0}, {"sinks": -1}, {"horizon": 0}, {"decay": "fast"}])
def test_wrong_hyper_parameters_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(KvbenchError, match=next(iter(wrong))):
        KvpopLinear(**wrong)  # type: ignore[arg-type] # wrong on purpose


def test_state_without_scorer_is_refused() -> None:
    with pytest.raises(KvbenchError, match="layer 1"):
        KvpopLinear().state(request(None))


def test_learned_decay_has_a_gradient_and_is_never_positive() -> None:
    scorer, given = trained(KvpopLinear(decay="learned", horizon=500)), tokens(1, 20)
    torch.autograd.backward(scorer.priority(scorer(given.keys, given.values), given.positions).sum())
    assert scorer.decay.floating is not None
    assert scorer.decay.floating.grad is not None
    assert bool((scorer.log_decay() < 0).all())
    assert bool((scorer.log_decay() >= -math.log(100) / 500).all())
