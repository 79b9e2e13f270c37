"""Teacher-forced feeding: which tokens are kept and what the model then answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.core.naive import streamed_sets
from kvbench.core.policy import Policy
from kvbench.engine import attention
from kvbench.engine.attention import under_mask
from kvbench_policies.random import Random
from kvbench_policies.streaming_llm import StreamingLlm
from tests.engine.tiny import SLIDING, Delayed, Flat, Table, Trace, dense, feed, load, text


def _close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def _mask(policy: Table, budget: int, heads: int, kv_heads: int, size: int) -> Tensor:
    """What each query head may see [1, Hq, S, S], from the slow truth."""
    priority = policy.priority(kv_heads, torch.arange(size)[None])[0].nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    mask = torch.zeros(kv_heads, size, size, dtype=torch.bool)
    for head in range(kv_heads):
        sets = streamed_sets(
            priority[head].tolist(), policy.sinks, policy.window, budget - policy.sinks - policy.window
        )
        for query, tokens in enumerate(sets):
            mask[head, query, sorted(tokens)] = True
    return mask.repeat_interleave(heads // kv_heads, 0)[None]


@pytest.mark.parametrize(("kind", "kv_heads"), [("qwen3", 2), ("llama", 4), ("llama", 1)])
@pytest.mark.parametrize("prompt", [1, 60])
@pytest.mark.parametrize("odd", [False, True])
def test_injected_priorities_equal_a_dense_forward_under_an_explicit_mask(
    kind: str, kv_heads: int, prompt: int, odd: bool
) -> None:
    loaded, policy, budget = load(kind, kv_heads=kv_heads), Table(odd=odd), 12
    ids = text(1, 80)
    trace = feed(loaded, policy, budget, ids, prompt)
    mask = _mask(policy, budget, 4, kv_heads, 80)
    for place, sets in enumerate(trace.kept, start=prompt - 1):
        expected = [
            frozenset(mask[0, 4 // kv_heads * head, place].nonzero().flatten().tolist()) for head in range(kv_heads)
        ]
        assert sets == [[expected], [expected]], place
    _close(trace.logits, dense(loaded, ids, mask)[:, prompt - 1 :])


@pytest.mark.parametrize(
    "policy",
    [
        Table(),
        Table(levels=1),
        Table(sinks=0, window=1),
        Table(sinks=0, window=7, odd=True),
        Table(sinks=5, window=6, levels=2, odd=True),
        Delayed(),
        Delayed(sinks=0, window=1),
        Delayed(sinks=6, window=5),
        Random(),
        StreamingLlm(),
    ],
    ids=str,
)
def test_parallel_prefill_equals_token_by_token(policy: Policy) -> None:
    loaded, ids = load(), text(2, 40)
    streamed = feed(loaded, policy, 12, ids)
    for prompt, end in ((11, 16), (13, 20), (30, 40), (40, 40)):
        parallel = feed(loaded, policy, 12, ids[:, :end], prompt)
        assert parallel.kept == streamed.kept[prompt - 1 : end]
        _close(parallel.logits, streamed.logits[:, prompt - 1 : end])
        if end == 40:
            _same_storage(parallel, streamed)


@pytest.mark.parametrize("limit", [1, 8 * 50, 8 * 50 * 7 + 3])
def test_a_bounded_mask_changes_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, four query heads, 50 tokens: blocks of 1 (below the limit is nothing), 1 and 7 queries."""
    loaded, ids = load(), text(2, 55)
    for policy in (Table(odd=True), Delayed()):
        with monkeypatch.context() as patch:
            blocks: list[int] = []

            def noting(query: Tensor, *rest: Any, seen: list[int] = blocks) -> Tensor:
                seen.append(query.shape[2])
                return under_mask(query, *rest)

            patch.setattr(attention, "under_mask", noting)
            whole = feed(loaded, policy, 12, ids, 50)
            assert set(blocks) == {50}
            blocks.clear()
            patch.setattr("kvbench.engine.layer._MASK_ELEMENTS", limit)
            bounded = feed(loaded, policy, 12, ids, 50)
        assert max(blocks) == max(1, limit // (8 * 50))
        assert bounded.kept == whole.kept
        _close(bounded.logits, whole.logits)
        _same_storage(bounded, whole)


def _same_storage(one: Trace, other: Trace) -> None:
    """Slots may be in another order; what belongs to a position is the same, its priority and its state too."""
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for name in ("keys", "values", "priority", "positions"):
            tensors = []
            for layer in (mine, theirs):
                order = layer.slots.positions.argsort(-1)
                tensor = getattr(layer.slots, name)
                tensors.append(
                    tensor.gather(2, order[..., None].expand_as(tensor))
                    if tensor.dim() == 4
                    else tensor.gather(2, order)
                )
            _close(*tensors)
        for state, others in zip(mine.state.tensors(), theirs.state.tensors(), strict=True):
            _close(state, others)


def test_streaming_llm_equals_a_dense_forward_under_an_explicit_mask() -> None:
    loaded, ids = load(), text(2, 120)
    key, query = torch.arange(120), torch.arange(120)[:, None]
    mask = ((key <= query) & ((key < 4) | (key > query - 28)))[None, None]
    for prompt in (1, 20, 119):
        trace = feed(loaded, StreamingLlm(), 32, ids, prompt)
        _close(trace.logits, dense(loaded, ids, mask)[:, prompt - 1 :])


@pytest.mark.parametrize("kind", ["qwen3_sliding", "gemma3"])
@pytest.mark.parametrize("prompt", [1, 5, SLIDING, SLIDING + 1, 30])
def test_sliding_layers_keep_their_own_window(kind: str, prompt: int) -> None:
    loaded, ids = load(kind), text(2, 40)
    policy = StreamingLlm()
    trace = feed(loaded, policy, 200, ids, prompt)
    _close(trace.logits, dense(loaded, ids)[:, prompt - 1 :])
    sliding = loaded.model.config.layer_types.index("sliding_attention")
    for place, sets in enumerate(trace.kept, start=prompt - 1):
        assert sets[sliding][0][0] == frozenset(range(max(0, place - SLIDING + 1), place + 1))
        assert sets[1 - sliding][0][0] == frozenset(range(place + 1))


@pytest.mark.parametrize("kind", ["qwen3_sliding", "gemma3"])
def test_sliding_layers_do_not_change_what_prefill_keeps(kind: str) -> None:
    loaded, ids = load(kind), text(2, 60)
    for policy in (Table(), Delayed()):
        parallel, streamed = feed(loaded, policy, 12, ids, 50), feed(loaded, policy, 12, ids)
        assert parallel.kept == streamed.kept[49:]
        _close(parallel.logits, streamed.logits[:, 49:])


@pytest.mark.parametrize("policy", [Table(odd=True), Delayed(), Flat()], ids=str)
@pytest.mark.parametrize("prompt", [1, 64])
def test_sinks_and_window_survive_and_the_budget_holds(policy: Policy, prompt: int) -> None:
    trace = feed(load(), policy, 16, text(2, 90), prompt)
    split = policy.split(16, load().geometry)
    before = None
    for place, layers in enumerate(trace.kept, start=prompt - 1):
        for sets in layers:
            for row in sets:
                for head in row:
                    assert len(head) == min(16, place + 1)
                    assert head >= set(range(min(split.sinks, place + 1)))
                    assert head >= set(range(max(0, place - split.window + 1), place + 1))
        if before is not None:
            pairs = zip(_flat(before), _flat(layers), strict=True)
            assert all(now - {place} <= then for then, now in pairs), "what was dropped came back"
        before = layers


def _flat(layers: list[list[list[frozenset[int]]]]) -> list[frozenset[int]]:
    return [head for sets in layers for row in sets for head in row]


def test_window_of_an_observed_policy_is_protected_through_a_chunked_prompt() -> None:
    # Window 14 of 18 slots: two at most may leave at once.
    policy = Flat(sinks=2, window=14)
    trace = feed(load(), policy, 18, text(1, 70), 60)
    assert _flat(trace.kept[0])[0] >= {0, 1, *range(46, 60)}


@pytest.mark.parametrize("policy", [Delayed(), Flat()], ids=str)
def test_what_is_kept_does_not_depend_on_later_tokens(policy: Policy) -> None:
    loaded, ids = load(), text(1, 80)
    other = ids.clone()
    other[:, 50:] = text(1, 30)
    one, two = feed(loaded, policy, 12, ids), feed(loaded, policy, 12, other)
    assert one.kept[:50] == two.kept[:50]
    assert torch.equal(one.logits[:, :50], two.logits[:, :50])
    whole, part = feed(loaded, policy, 12, ids, 80), feed(loaded, policy, 12, ids[:, :50], 50)
    if policy.static:
        assert part.kept[0] == one.kept[49]
        assert whole.kept[0] == one.kept[79]


def test_chunked_prompts_say_what_they_keep_at_their_ends() -> None:
    # Chunks of one token are token by token.
    loaded, ids = load(), text(2, 60)
    for policy in (Flat(), Flat(sinks=0, window=1)):
        chunked, streamed = feed(loaded, policy, 8, ids, 40), feed(loaded, policy, 8, ids)
        assert chunked.kept == streamed.kept[39:]
        _close(chunked.logits, streamed.logits[:, 39:])
