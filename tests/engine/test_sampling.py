from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from kvbench.core.hashing import uniform
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Request, Sampling
from kvbench.engine.sampling import choose
from kvbench_policies.streaming_llm import StreamingLlm
from tests.engine.tiny import load, text

DRAWS = 20_000


def _draw(logits: Tensor, sampling: Sampling, count: int = DRAWS) -> Tensor:
    """`count` tokens from one row of logits: half by seed, half by index."""
    seeds = torch.arange(count) // 100
    index = torch.arange(count) % 100
    return choose(logits.expand(count, -1), sampling, seeds, index)[0]


def _frequencies_fit(tokens: Tensor, weights: Tensor) -> bool:
    seen = torch.bincount(tokens, minlength=len(weights)).double()
    used = weights > 0
    assert seen[~used].sum() == 0
    if used.sum() == 1:
        return True
    expected = weights[used].double() / weights.double().sum() * len(tokens)
    return bool(stats.chisquare(seen[used].numpy(), expected.numpy()).pvalue > 1e-4)


LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -0.3, 1.7, -4.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    tokens = _draw(LOGITS, Sampling(temperature))
    assert _frequencies_fit(tokens, (LOGITS / temperature).softmax(-1))


def test_top_k_draws_from_the_best_k() -> None:
    weights = LOGITS.softmax(-1)
    weights[LOGITS < 1.0] = 0
    assert _frequencies_fit(_draw(LOGITS, Sampling(1.0, top_k=3)), weights)


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9, 0.999])
def test_top_p_draws_from_the_smallest_set_that_reaches_it(top_p: float) -> None:
    weights = LOGITS.softmax(-1)
    mass, kept = 0.0, []
    for token in weights.argsort(descending=True).tolist():
        kept.append(token)
        mass += float(weights[token])
        if mass >= top_p:
            break
    weights[[token for token in range(8) if token not in kept]] = 0
    assert _frequencies_fit(_draw(LOGITS, Sampling(1.0, top_p=top_p)), weights)


def test_temperature_then_top_k_then_top_p() -> None:
    weights = (LOGITS / 2).softmax(-1)
    weights[LOGITS < 0.5] = 0  # the best four
    weights = weights / weights.sum()
    weights[1] = 0 if float(weights[3] + weights[6]) >= 0.6 else weights[1]
    weights[4] = 0 if float(weights[3] + weights[6] + weights[1]) >= 0.6 else weights[4]
    assert _frequencies_fit(_draw(LOGITS, Sampling(2.0, top_p=0.6, top_k=4)), weights)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_p=1e-6),
        Sampling(1.0, top_p=0.0),
        Sampling(1e-4),
        Sampling(1e-6, 0.9, 5),
    ],
    ids=str,
)
def test_limits_are_greedy(sampling: Sampling) -> None:
    logits = 3 * torch.randn(500, 64)
    seeds = torch.arange(500)
    assert torch.equal(choose(logits, sampling, seeds, seeds)[0], logits.argmax(-1))


def test_wide_filters_filter_nothing() -> None:
    logits = torch.randn(300, 64)
    seeds = torch.arange(300)
    plain = choose(logits, Sampling(1.0), seeds, seeds)[0]
    for sampling in (Sampling(1.0, top_k=64), Sampling(1.0, top_k=1000), Sampling(1.0, top_k=0)):
        assert torch.equal(choose(logits, sampling, seeds, seeds)[0], plain)


def test_near_ties() -> None:
    logits = torch.tensor([[1.0, 1.0005, 0.0], [1.0, 1.1, 0.0]])
    zero = torch.zeros(2, dtype=torch.int64)
    assert choose(logits, Sampling(), zero, zero)[1].tolist() == [True, False]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_near_ties_of_a_draw_are_those_of_the_scores_that_decide(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of zero: -log(-log u) = 0 for u = 1/e. A gap in logits counts whatever the temperature."""
    monkeypatch.setattr("kvbench.engine.sampling.uniform", lambda *_: torch.full((3, 3), math.exp(-1)))
    logits = torch.tensor([[1.0, 1.0005, 0.0], [1.0, 1.002, 0.0], [0.0, 1.0, 1.0]])
    zero = torch.zeros(3, dtype=torch.int64)
    assert choose(logits, Sampling(temperature), zero, zero)[1].tolist() == [True, False, True]
    # What is filtered away ties with nothing.
    assert choose(logits, Sampling(temperature, top_k=1), zero, zero)[1].tolist() == [False, False, False]


def test_equal_logits_are_seldom_near_ties_when_noise_decides() -> None:
    logits, seeds = torch.zeros(DRAWS, 2), torch.arange(DRAWS)
    near = choose(logits, Sampling(1.0), seeds, seeds)[1].double().mean()
    # The difference of two Gumbel draws is logistic: |x| < 0.001 has a probability of 0.0005.
    assert 0 < near < 0.002
    assert bool(choose(logits, Sampling(), seeds, seeds)[1].all())


def test_top_k_keeps_exactly_k_of_equal_logits_and_the_lower_ids() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, 2.0, 1.0])
    for count, kept in ((1, {1}), (2, {1, 5}), (3, {1, 5, 2}), (5, {1, 5, 2, 3, 4})):
        assert set(_draw(logits, Sampling(1.0, top_k=count)).tolist()) == kept
    assert set(_draw(torch.zeros(8), Sampling(1.0, top_k=3)).tolist()) == {0, 1, 2}
    assert set(_draw(torch.zeros(8), Sampling(1.0, top_p=0.5)).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("value", [2.0**-24, 1 - 2.0**-24])
def test_the_most_extreme_noise_is_finite_and_harmless(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform number of exactly 1 would be drawn every 2**24 entries, and would win against any logit."""

    def extreme(*counters: Tensor) -> Tensor:
        drawn = uniform(*counters)
        drawn[:, 3] = value
        return drawn

    monkeypatch.setattr("kvbench.engine.sampling.uniform", extreme)
    logits = torch.zeros(1, 8)
    logits[0, 0] = 60.0
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.9)):
        assert int(choose(logits, sampling, torch.tensor([1]), torch.tensor([0]))[0]) == 0


def test_the_noise_is_not_the_priorities_of_random_eviction() -> None:
    # Both hash (request seed, small number, position or vocabulary entry).
    seed, small, entries = torch.tensor([3]), torch.tensor([1]), torch.arange(1000)
    logits = torch.zeros(1, 1000)
    token, _ = choose(logits, Sampling(1.0), seed, small)
    assert int(token) != int(uniform(seed[:, None], small[:, None], entries[None]).argmax())


def test_a_request_has_its_own_stream() -> None:
    loaded, prompt = load(), tuple(text(8).tolist())
    engine = Engine(loaded, StreamingLlm(), 16, rows=3)
    requests = [Request(prompt, 12, seed=seed) for seed in (5, 6, 7, 5, 2**62, -1)]
    sampling = Sampling(temperature=1.0)
    answers = engine.generate(requests, sampling).completions
    assert answers == engine.generate(requests, sampling).completions
    assert answers[0] == answers[3]
    assert len({answer.tokens for answer in answers}) == 5
    shuffled = [4, 2, 0, 5, 3, 1]
    again = Engine(loaded, StreamingLlm(), 16, rows=2).generate([requests[i] for i in shuffled], sampling).completions
    assert list(again) == [answers[i] for i in shuffled]


def test_sampled_answers_of_many_seeds_follow_the_model() -> None:
    loaded, prompt = load(), tuple(text(8).tolist())
    answers = Engine(loaded, StreamingLlm(), 16, rows=64).generate(
        [Request(prompt, 1, seed=seed) for seed in range(1500)], Sampling(temperature=3.0)
    )
    first = torch.tensor([answer.tokens[0] for answer in answers.completions])
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    weights = (logits / 3).softmax(-1)
    # Rare entries are one class, as the test wants at least five expected in each.
    rare = weights < 5 / 1500
    tokens = torch.where(rare[first], 0, first + 1)
    classes = torch.cat([weights[rare].sum()[None], weights.masked_fill(rare, 0)])
    assert _frequencies_fit(tokens, classes)
