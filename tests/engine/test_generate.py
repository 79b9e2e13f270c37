"""`Engine.generate`: batches, refills, ends, and agreement with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Policy
from kvbench.engine import generate
from kvbench.engine.generate import Engine
from kvbench.engine.layer import Layer
from kvbench.engine.requests import Completion, Request, Sampling, Stop
from kvbench.engine.rows import Rows
from kvbench.engine.run import Setting, prefill
from kvbench.models.source import LoadedModel
from kvbench_policies.full import Full
from kvbench_policies.random import Random
from kvbench_policies.streaming_llm import StreamingLlm
from kvbench_policies.tova import Tova
from tests.engine.tiny import VOCABULARY, Delayed, Table, dense, greedy, load, text


def _prompt(size: int) -> tuple[int, ...]:
    return tuple(text(size).tolist())


def _mixed(count: int = 9) -> list[Request]:
    """Lengths around a budget of 12, caps from 1 on, a prompt of one token."""
    sizes = [1, 5, 12, 13, 30, 5, 2, 40, 1]
    caps = [13, 1, 7, 12, 3, 8, 15, 1, 5]
    return [Request(_prompt(sizes[i]), caps[i], seed=100 + i) for i in range(count)]


def _alone(
    loaded: LoadedModel, policy: Policy, budget: int | None, requests: list[Request], sampling: Sampling | None = None
) -> list[Completion]:
    engine = Engine(loaded, policy, budget, rows=1)
    return [engine.generate([request], sampling).completions[0] for request in requests]


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads"),
    [("qwen3", 4, 2), ("llama", 4, 4), ("llama", 4, 2), ("llama", 4, 1), ("gemma3", 4, 2), ("qwen3_sliding", 4, 1)],
)
def test_full_answers_like_transformers(kind: str, heads: int, kv_heads: int) -> None:
    loaded = load(kind, heads, kv_heads)
    requests = [Request(_prompt(size), 15) for size in (1, 7, 20)]
    completions = Engine(loaded, Full(), None, rows=2).generate(requests).completions
    for request, completion in zip(requests, completions, strict=True):
        assert completion.near_ties == 0
        assert list(completion.tokens) == greedy(loaded, request.prompt, 15)
        assert completion.finish == "length"
    assert len({token for completion in completions for token in completion.tokens}) > 5, "the model says nothing"


GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0, top_p=0.9)


@pytest.mark.parametrize(
    ("policy", "sampling"),
    [
        (Full(), GREEDY),
        (Random(), GREEDY),
        (Random(), SAMPLED),
        (Tova(), SAMPLED),
        (Table(odd=True), GREEDY),
        (Delayed(), GREEDY),
        (Delayed(), SAMPLED),
    ],
    ids=lambda value: getattr(value, "name", "sampled" if value == SAMPLED else "greedy"),
)
def test_refilled_mixed_rows_answer_like_single_runs(policy: Policy, sampling: Sampling) -> None:
    loaded, requests = load(), _mixed()
    budget = 12 if policy.evicts else None
    alone = _alone(loaded, policy, budget, requests, sampling)
    together = Engine(loaded, policy, budget, rows=4).generate(requests, sampling).completions
    assert list(together) == alone
    backwards = Engine(loaded, policy, budget, rows=2).generate(requests[::-1], sampling).completions
    assert list(backwards[::-1]) == alone


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_sliding"])
@pytest.mark.parametrize("policy", [Tova(), Table()], ids=lambda policy: policy.name)
def test_refilled_mixed_rows_of_sliding_models(kind: str, policy: Policy) -> None:
    loaded, requests = load(kind), _mixed()
    budget = 12 if policy.evicts else None
    together = Engine(loaded, policy, budget, rows=3).generate(requests).completions
    assert list(together) == _alone(loaded, policy, budget, requests)


@pytest.mark.parametrize("policy", [Random(), StreamingLlm(), Tova(), Table()], ids=lambda policy: policy.name)
def test_the_end_of_sequence_ends_a_row(policy: Policy) -> None:
    prompts = [_prompt(size) for size in (3, 20, 9, 1, 30, 6)]
    free = Engine(load(), policy, 12, rows=4).generate([Request(prompt, 20) for prompt in prompts]).completions
    # A first token of some answers, so that at least one of them ends at once.
    end = free[2].tokens[0]
    loaded = load(eos=(end, VOCABULARY + 5))
    ended = Engine(loaded, policy, 12, rows=2).generate([Request(prompt, 20) for prompt in prompts]).completions
    for before, after in zip(free, ended, strict=True):
        if end in before.tokens:
            assert after.tokens == before.tokens[: before.tokens.index(end) + 1]
            assert after.finish == "eos"
        else:
            assert (after.tokens, after.finish) == (before.tokens, "length")
    assert ended[2].tokens == (end,)


def test_the_cap_and_the_end_at_once_is_an_end() -> None:
    request = Request(_prompt(5), 4)
    free = Engine(load(), Full(), None).generate([request]).completions[0]
    last = free.tokens[-1]
    cap = free.tokens.index(last) + 1
    after = Engine(load(eos=(last,)), Full(), None).generate([Request(request.prompt, cap)]).completions[0]
    assert (len(after.tokens), after.finish) == (cap, "eos")


@pytest.mark.parametrize("policy", [Random(), StreamingLlm(), Tova()], ids=lambda policy: policy.name)
def test_looser_bounds_of_lengths_change_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What captured graphs are given: `shortest` down to 0 or the capacity, `longest` up, never across the capacity."""
    loaded, requests = load(), _mixed()
    exact = Engine(loaded, policy, 12, rows=4).generate(requests).completions
    tight = Rows.extent

    def loose(self: Rows) -> tuple[int, int]:
        shortest, longest = tight(self)
        return (12 if shortest >= 12 else 0), (12 if longest <= 12 else 13)

    monkeypatch.setattr(Rows, "extent", loose)
    assert Engine(loaded, policy, 12, rows=4).generate(requests).completions == exact


def test_steps_past_the_end_of_every_row_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at `done`, rows go on; a GPU looks every 16 steps."""
    loaded, requests = load(eos=(3, 4, 5, 6, 7, 8)), _mixed()
    for policy in (Full(), Tova(), Delayed()):
        budget = 12 if policy.evicts else None
        exact = Engine(loaded, policy, budget, rows=3).generate(requests)
        with monkeypatch.context() as patch:
            patch.setattr(Rows, "finished", _every(16, Rows.finished))
            late = Engine(loaded, policy, budget, rows=3).generate(requests)
        assert late.completions == exact.completions
        assert late.audit == exact.audit


def _every(count: int, finished: Callable[[Rows], list[int]]) -> Callable[[Rows, Stop | None], list[int]]:
    calls = [0]

    def patched(self: Rows, stop: Stop | None) -> list[int]:
        calls[0] += 1
        return finished(self) if calls[0] % count == 0 else []

    return patched


@pytest.mark.parametrize("policy", [Full(), Tova(), StreamingLlm(), Delayed()], ids=lambda policy: policy.name)
def test_bf16_runs_and_agrees_with_itself(policy: Policy) -> None:
    loaded = load("llama", dtype=torch.bfloat16)
    budget = 12 if policy.evicts else None
    requests = _mixed()
    first = Engine(loaded, policy, budget, rows=4).generate(requests)
    assert first.completions == Engine(loaded, policy, budget, rows=4).generate(requests).completions
    assert first.audit.violations == 0
    assert [len(completion.tokens) for completion in first.completions] == [request.max_new for request in requests]


def test_near_ties_are_counted() -> None:
    loaded = load("llama", tie_word_embeddings=True)
    with torch.no_grad():
        embedding: Tensor = loaded.model.get_output_embeddings().weight
        before = embedding.clone()
        embedding[1::2] = embedding[::2]  # every logit exists twice
    try:
        requests = [Request(_prompt(4), cap) for cap in (10, 1, 6)]
        completions = Engine(loaded, Full(), None, rows=1).generate(requests).completions
    finally:
        embedding.copy_(before)
    assert [completion.near_ties for completion in completions] == [10, 1, 6]
    assert Engine(loaded, Full(), None).generate([Request(_prompt(4), 10)]).completions[0].near_ties < 3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_left_as_it_was(implementation: str) -> None:
    loaded = load("llama")
    loaded.model.set_attn_implementation(implementation)
    ids = text(2, 20)
    before = dense(loaded, ids)
    state = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}

    def check() -> None:
        assert loaded.model.config._attn_implementation == implementation
        assert torch.equal(dense(loaded, ids), before)
        assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.model.state_dict().items())
        assert not any(tensor.is_inference() for tensor in loaded.model.state_dict().values())

    Engine(loaded, StreamingLlm(), 12).generate(_mixed())
    check()

    def fail(layer: int, step: int, positions: Tensor) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        Engine(loaded, StreamingLlm(), 12).generate(_mixed(), observer=fail)
    check()
    loaded.model.set_attn_implementation("sdpa")


def test_prefill_says_how_it_was_done() -> None:
    loaded = load()
    short, long = [Request(_prompt(12), 20)], [Request(_prompt(13), 2)]
    assert Engine(loaded, Tova(), 12).generate(short).prefill == "exact"
    assert Engine(loaded, Tova(), 12).generate(long).prefill == "chunked"
    assert Engine(loaded, StreamingLlm(), 12).generate(long).prefill == "exact"


@pytest.mark.parametrize("policy", [Full(), Tova(), Table()], ids=lambda policy: policy.name)
def test_prompts_of_one_length_are_read_in_bounded_pieces(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load()
    requests = [Request(_prompt(size), 4, seed=size) for size in (20, 9, 20, 20, 9, 20, 20, 70)]
    budget = 12 if policy.evicts else None
    whole = Engine(loaded, policy, budget, rows=8).generate(requests)
    read: list[tuple[int, int]] = []

    def noting(setting: Setting, layers: Sequence[Layer], prompts: Tensor) -> Tensor:
        read.append((prompts.shape[0], prompts.shape[1]))
        return prefill(setting, layers, prompts)

    monkeypatch.setattr(generate, "prefill", noting)
    monkeypatch.setattr(generate, "_PREFILL_TOKENS", 60)
    pieces = Engine(loaded, policy, budget, rows=8).generate(requests)
    assert sorted(read) == [(1, 70), (2, 9), (2, 20), (3, 20)]
    assert (pieces.completions, pieces.audit) == (whole.completions, whole.audit)
    # Explicit attention weights of 4 heads over 12 slots, for one prompt of 20 or 9 tokens and a bit.
    read.clear()
    monkeypatch.setattr(generate, "_PREFILL_WEIGHTS", 4 * 12 * 12 + 5)
    Engine(loaded, policy, budget, rows=8).generate(requests)
    assert max(count for count, _ in read) == (1 if policy.needs_attention else 3)


def test_timing_and_progress() -> None:
    told: list[int] = []
    requests = _mixed()
    generation = Engine(load(), Full(), None, rows=3).generate(requests, progress=told.append)
    timing = generation.timing
    assert timing.tokens == sum(request.max_new for request in requests)
    assert timing.steps == len(told)
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    # Every token but the first of each request, which its prompt gives.
    assert sum(told) == timing.tokens - len(requests)
    single = Engine(load(), Full(), None).generate([Request((1,), 1)])
    assert (single.timing.steps, single.timing.ms_per_step) == (0, None)


def test_the_observer_sees_every_layer_at_every_step() -> None:
    seen = []
    Engine(load(), StreamingLlm(), 12, rows=2).generate(
        [Request(_prompt(3), 5), Request(_prompt(4), 5)],
        observer=lambda layer, step, positions: seen.append((layer, step, tuple(positions.shape))),
    )
    assert seen == [(layer, step, (2, 2, 12)) for step in range(4) for layer in range(2)]


def test_bad_requests_are_refused() -> None:
    loaded = load(positions=64)
    engine = Engine(loaded, Full(), None)
    with pytest.raises(KvbenchError, match="list of requests is empty"):
        engine.generate([])
    with pytest.raises(KvbenchError, match="needs 65 positions; model 'qwen3' has 64"):
        engine.generate([Request(_prompt(60), 5)])
    assert len(engine.generate([Request(_prompt(60), 4)]).completions[0].tokens) == 4
    for request in (Request((), 5), Request((1,), 0)):
        with pytest.raises(KvbenchError, match="at least one token of prompt"):
            engine.generate([Request((1, 2), 3), request])


def test_a_budget_is_needed_and_must_do() -> None:
    with pytest.raises(KvbenchError, match="'random' needs a budget"):
        Engine(load(), Random(), None)
    with pytest.raises(KvbenchError, match="'streaming_llm' needs a budget of at least 6 slots; this one has 5"):
        Engine(load(), StreamingLlm(), 5)
    assert Engine(load(), StreamingLlm(), 6).generate([Request(_prompt(9), 9)]).audit.peak == 6


def test_a_stop_ends_a_completion_where_it_says() -> None:
    """Each request ends at its own first token from a set; others in the batch go on as if nothing had happened."""
    loaded = load()
    requests = [Request(tuple(text(size).tolist()), 20) for size in (5, 9, 5)]
    engine = Engine(loaded, Full(), None, rows=2)
    free = engine.generate(requests).completions
    marks = (free[0].tokens[0], free[1].tokens[7], -1)
    ended = engine.generate(requests, stop=lambda index, tokens: marks[index] in tokens).completions
    for completion, whole, mark in zip(ended, free, marks, strict=True):
        size = whole.tokens.index(mark) + 1 if mark in whole.tokens else 20
        assert completion.tokens == whole.tokens[:size]
        assert completion.finish == ("stop" if mark in whole.tokens else "length")
