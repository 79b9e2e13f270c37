"""What every registered policy must do, whatever it ranks by."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from kvbench.core.policy import Policy
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Request, Sampling
from kvbench.plugins import load_registry
from tests.engine.tiny import feed, load, random_scorers, text

NAMES = sorted(load_registry().policies)
EVICTING = [name for name in NAMES if name != "full"]
BOUNDED = [name for name in EVICTING if load_registry().policies[name].hard_budget]
"""Without a hard budget a policy promises no number of entries; tests/policies/test_dms.py says what it does promise."""
LONG = 500


@cache
def _make(name: str) -> tuple[Policy, nn.ModuleList | None]:
    made = load_registry().policy(name).load()
    assert isinstance(made, type)
    policy = made()
    assert isinstance(policy, Policy)
    with torch.random.fork_rng():
        return policy, random_scorers(policy, load().geometry)


def _budget(policy: Policy, spare: int = 8) -> int:
    """A budget for `spare` long slots more than the fewest."""
    return policy.smallest_budget(load().geometry) + spare


def _prompt(size: int) -> tuple[int, ...]:
    return tuple(text(size).tolist())


@pytest.mark.parametrize("name", NAMES)
def test_the_class_agrees_with_its_entry(name: str) -> None:
    policy, _ = _make(name)
    entry = load_registry().policy(name)
    assert policy.name == name
    assert policy.learned == entry.learned
    assert policy.hard_budget == entry.hard_budget
    assert (entry.prefill == "exact") == policy.static
    assert ("attention" in entry.needs) == policy.needs_attention
    assert hash(policy) == hash(type(policy)())


@pytest.mark.parametrize("name", NAMES)
def test_the_split_adds_up(name: str) -> None:
    policy, _ = _make(name)
    geometry = load().geometry
    for budget in range(policy.smallest_budget(geometry), policy.smallest_budget(geometry) + 30):
        split = policy.checked_split(budget, geometry)
        assert split.slots + split.charged == budget
        assert split.long >= (1 if policy.evicts else 0)
        assert split.window >= 1
        assert split.sinks >= 0


@pytest.fixture(scope="module")
def unlimited() -> tuple[tuple[int, ...], Tensor, tuple[int, ...], int]:
    """`full` over 500 tokens: prompt, logits of the same text, tokens, near ties."""
    generator = torch.Generator().manual_seed(0)
    prompt = tuple(torch.randint(64, (12,), generator=generator).tolist())
    loaded = load()
    policy, _ = _make("full")
    answer = Engine(loaded, policy, None).generate([Request(prompt, LONG)]).completions[0]
    ids = torch.tensor([prompt + answer.tokens])
    return prompt, feed(loaded, policy, ids.shape[1], ids, 12).logits, answer.tokens, answer.near_ties


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_as_long_as_the_text_is_full(
    name: str, unlimited: tuple[tuple[int, ...], Tensor, tuple[int, ...], int]
) -> None:
    prompt, logits, tokens, near_ties = unlimited
    policy, scorers = _make(name)
    loaded = load()
    ids = torch.tensor([prompt + tokens])
    budget = ids.shape[1] + policy.split(1000, loaded.geometry).charged
    trace = feed(loaded, policy, budget, ids, 12, scorers)
    for place, sets in enumerate(trace.kept, start=11):
        assert sets == [[[frozenset(range(place + 1))] * 2]] * 2
    torch.testing.assert_close(trace.logits, logits, atol=1e-4, rtol=1e-4)
    greedy = tuple(trace.logits[0, :-1].argmax(-1).tolist())
    assert sum(mine != theirs for mine, theirs in zip(greedy, tokens, strict=True)) <= near_ties


@pytest.mark.parametrize("name", BOUNDED)
def test_the_budget_holds_and_nothing_comes_back(name: str) -> None:
    policy, scorers = _make(name)
    split = policy.split(_budget(policy), load().geometry)
    size = split.slots + 30
    for prompt in (1, split.slots + 12):
        before = None
        trace = feed(load(), policy, _budget(policy), text(1, size), prompt, scorers)
        for place, layers in enumerate(trace.kept, start=prompt - 1):
            heads = [head for rows in layers for row in rows for head in row]
            for head in heads:
                assert len(head) == min(split.slots, place + 1)
                assert head >= {
                    *range(min(split.sinks, place + 1)),
                    *range(max(0, place - split.window + 1), place + 1),
                }
            if before is not None:
                assert all(now - {place} <= then for then, now in zip(before, heads, strict=True))
            before = heads


@pytest.mark.parametrize("name", EVICTING)
def test_static_prompts_over_budget_are_exact(name: str) -> None:
    policy, scorers = _make(name)
    if not policy.static:
        pytest.skip("reads long prompts in chunks and says so")
    budget = _budget(policy)
    ids = text(1, budget + 40)
    streamed = feed(load(), policy, budget, ids, 1, scorers)
    for prompt in (budget - 3, budget + 1, budget + 37):
        parallel = feed(load(), policy, budget, ids, prompt, scorers)
        assert parallel.kept == streamed.kept[prompt - 1 :]
        torch.testing.assert_close(parallel.logits, streamed.logits[:, prompt - 1 :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", EVICTING)
def test_what_is_kept_does_not_depend_on_later_tokens(name: str) -> None:
    policy, scorers = _make(name)
    budget = _budget(policy)
    ids = text(1, budget + 30)
    other = ids.clone()
    other[:, budget + 10 :] = text(1, 20)
    one, two = (feed(load(), policy, budget, each, 1, scorers) for each in (ids, other))
    assert one.kept[: budget + 10] == two.kept[: budget + 10]


@pytest.mark.parametrize("name", NAMES)
def test_refilled_mixed_rows_answer_like_single_runs(name: str) -> None:
    policy, scorers = _make(name)
    budget = _budget(policy) if policy.evicts else None
    longest = (budget or 30) + 10
    sizes = ((1, 30), (longest, 6), (9, 1), (20, 20), (longest, 15), (5, 9))
    requests = [Request(_prompt(size), cap, seed=size) for size, cap in sizes]
    engines = [Engine(load(), policy, budget, scorers, rows=rows) for rows in (1, 3)]
    alone, together = (engine.generate(requests, Sampling(temperature=1.0)) for engine in engines)
    assert together.completions == alone.completions
    assert together.audit.violations == 0 or not policy.hard_budget
    assert together.audit.head_entries == alone.audit.head_entries
    assert together.audit.evictions == alone.audit.evictions


@pytest.mark.parametrize("name", EVICTING)
def test_it_evicts_something_other_than_recency_or_says_so(name: str) -> None:
    """A ranking that silently falls back to the newest tokens would look like a policy."""
    policy, scorers = _make(name)
    budget = _budget(policy)
    trace = feed(load(), policy, budget, text(1, budget + 60), budget + 60, scorers)
    split = policy.split(budget, load().geometry)
    newest = {*range(split.sinks), *range(budget + 60 - (split.slots - split.sinks), budget + 60)}
    only_recent = all(head == newest for rows in trace.kept[-1] for row in rows for head in row)
    assert only_recent == name.startswith("streaming_llm")
