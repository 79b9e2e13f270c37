"""Teacher-forced scores: the three ways of feeding, held to a dense forward under an explicit mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Policy
from kvbench.engine.generate import Engine
from kvbench.engine.run import Setting, contact, feed
from kvbench.engine.score import Passage, Scoring
from kvbench_policies.full import Full
from kvbench_policies.h2o import H2o
from kvbench_policies.random import Random
from kvbench_policies.streaming_llm import StreamingLlm
from kvbench_policies.tova import Tova
from tests.engine.tiny import Delayed, Flat, Table, dense, load, text
from tests.policies import tova_oracle


def _passages(*sizes: int, start: int = 1) -> list[Passage]:
    return [Passage(tuple(text(size).tolist()), start, seed) for seed, size in enumerate(sizes)]


def _score(policy: Policy, budget: int | None, passages: list[Passage], chunk: int | None = None) -> Scoring:
    return Engine(load(), policy, budget, rows=3).score(passages, chunk)


def _expected(logits: Tensor, passage: Passage) -> Tensor:
    """Log-probabilities of the scored tokens from logits [S, V] of all of them."""
    targets = torch.tensor(passage.tokens[passage.start :])
    return logits[passage.start - 1 : -1].log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def _close(scoring: Scoring, other: Scoring) -> None:
    for mine, theirs in zip(scoring.scores, other.scores, strict=True):
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=1e-4)


def _chunked_mask(policy: Table, budget: int, chunk: int, size: int) -> Tensor:
    """What each query sees [1, 4, S, S]: with lists, a chunk pushes out the lowest of what has left the window."""
    priority = policy.priority(2, torch.arange(size)[None])[0]
    mask = torch.zeros(2, size, size, dtype=torch.bool)
    for head in range(2):
        held: list[int] = []
        for start in range(0, size, chunk):
            new = list(range(start, min(start + chunk, size)))
            free = [p for p in held if policy.sinks <= p <= new[-1] - policy.window]
            free.sort(key=lambda p, h=head: (float(priority[h, p]), p))  # type: ignore[misc]  # bound now
            gone = set(free[: max(0, len(held) + len(new) - budget)])
            held = [p for p in held if p not in gone] + new
            assert len(held) <= budget
            for query in new:
                mask[head, query, [p for p in held if p <= query]] = True
    return mask.repeat_interleave(2, 0)[None]


def test_full_gives_the_models_own_log_probabilities() -> None:
    passages = [*_passages(40, 25, 33, 1 + 1, 40), Passage(tuple(text(30).tolist()), 12)]
    scoring = _score(Full(), None, passages)
    assert scoring.feeding == "exact"
    for passage, score in zip(passages, scoring.scores, strict=True):
        logits = dense(load(), torch.tensor([passage.tokens]))[0]
        torch.testing.assert_close(torch.tensor(score.logprobs), _expected(logits, passage), atol=1e-5, rtol=1e-5)
        best = logits[passage.start - 1 : -1].argmax(-1).tolist()
        assert list(score.greedy) == [a == b for a, b in zip(best, passage.tokens[passage.start :], strict=True)]


@pytest.mark.parametrize("policy", [Table(), Table(sinks=0, window=1), Delayed(), Random(), StreamingLlm(sinks=1)])
def test_exact_feeding_is_token_by_token(policy: Policy) -> None:
    passages = _passages(60, 60, 41, 9)
    exact, slow = _score(policy, 12, passages), _score(policy, 12, passages, 1)
    assert (exact.feeding, slow.feeding) == ("exact", "token")
    _close(exact, slow)
    for name in ("slots", "peak", "violations", "evictions", "cr_peak", "kv_bytes", "scorer_bytes"):
        assert getattr(exact.audit, name) == getattr(slow.audit, name), name
    assert exact.audit.cr_mean == pytest.approx(slow.audit.cr_mean)
    assert exact.audit.cr_end == pytest.approx(slow.audit.cr_end)


@pytest.mark.parametrize(
    ("policy", "chunk"),
    [
        (Table(), 4),
        (Table(), 2),
        (Table(sinks=0, window=1), 5),
        (Table(sinks=3, window=7), 3),
        (Table(odd=False, levels=1), 8),
        (StreamingLlm(sinks=2), 6),
    ],
)
def test_chunks_equal_a_dense_forward_under_an_explicit_mask(policy: Policy, chunk: int) -> None:
    table = policy if isinstance(policy, Table) else _Recency(sinks=2, window=1)
    passages = _passages(50, 50, 31)
    scoring = _score(policy, 14, passages, chunk)
    assert scoring.feeding == f"chunks of {chunk}"
    assert (scoring.audit.peak, scoring.audit.violations) == (14, 0)
    for passage, score in zip(passages, scoring.scores, strict=True):
        # The last token is not fed: it is in nobody's chunk.
        mask = _chunked_mask(table, 14, chunk, passage.fed)
        logits = dense(load(), torch.tensor([passage.tokens[:-1]]), mask)[0]
        logits = torch.cat([logits, logits[-1:]])
        torch.testing.assert_close(torch.tensor(score.logprobs), _expected(logits, passage), atol=1e-4, rtol=1e-4)


class _Recency(Table):
    def priority(self, heads: int, positions: Tensor) -> Tensor:
        return positions[:, None].float().expand(-1, heads, -1)


@pytest.mark.parametrize("chunk", [2, 3, 7])
def test_a_delayed_priority_is_the_same_in_chunks(chunk: int) -> None:
    """A chunk of tokens changes when victims are chosen, never a priority: with room for all of them scores are equal."""
    passages = _passages(40, 23)
    _close(_score(Delayed(), 40, passages, chunk), _score(Full(), None, passages))
    setting = Setting(load(), Delayed(), Delayed().split(40, load().geometry), None)
    ids = torch.tensor([passages[0].tokens])
    made = []
    for size in (1, chunk):
        layers = setting.layers(1, torch.zeros(1, dtype=torch.int64))
        with torch.inference_mode(), contact(load()):
            for start in range(0, 40, size):
                feed(load(), layers, ids[:, start : start + size], start)
        made.append(layers)
    for one, many in zip(*made, strict=True):
        assert torch.equal(one.slots.priority, many.slots.priority)
        assert torch.equal(one.slots.positions, many.slots.positions)


@pytest.mark.parametrize("chunk", [1, 4])
def test_tova_in_pieces_equals_its_oracle(chunk: int) -> None:
    (passage,) = _passages(46)
    ids = torch.tensor([passage.tokens[:-1]])
    edges = [*range(chunk, 45, chunk), 45]
    score = _score(Tova(), 12, [passage], chunk).scores[0]
    for edge, (logits, _) in zip(edges, tova_oracle.run(load(), 12, False, ids, edges), strict=True):
        expected = logits.log_softmax(-1)[passage.tokens[edge]]
        torch.testing.assert_close(torch.tensor(score.logprobs[edge - 1]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", [Tova(), H2o(), Flat(), Table(), Random()])
def test_a_budget_as_long_as_the_text_is_full(policy: Policy) -> None:
    passages = _passages(50, 50, 30)
    full = _score(Full(), None, passages)
    for chunk in (None, 1, 7):
        scoring = _score(policy, 49, passages, chunk)
        _close(scoring, full)
        assert (scoring.audit.evictions, scoring.audit.cr_mean) == (0, 0.0)


@pytest.mark.parametrize(("policy", "chunk"), [(Random(), None), (Random(), 4), (Tova(), None), (H2o(), 1)])
def test_company_does_not_change_a_score(policy: Policy, chunk: int | None) -> None:
    passages = _passages(50, 37, 50, 12, 50, 44)
    together = _score(policy, 12, passages, chunk)
    for index, passage in enumerate(passages):
        alone = _score(policy, 12, [passage], chunk)
        torch.testing.assert_close(
            torch.tensor(alone.scores[0].logprobs),
            torch.tensor(together.scores[index].logprobs),
            atol=1e-4,
            rtol=1e-4,
        )


def test_eviction_changes_scores_and_is_counted() -> None:
    passages = _passages(50, start=40)
    full, random = _score(Full(), None, passages), _score(Random(), 8, passages)
    assert abs(sum(full.scores[0].logprobs) - sum(random.scores[0].logprobs)) > 0.1
    assert random.audit.evictions == (49 - 8) * 2 * 2
    assert random.audit.peak == random.audit.slots == 8
    assert random.audit.cr_end == pytest.approx(1 - 8 / 49)
    removed = sum(max(0.0, 1 - 8 / seen) for seen in range(1, 50)) / 49
    assert random.audit.cr_mean == pytest.approx(removed)
    assert random.timing.tokens == 49


def test_the_reader_sees_every_prediction() -> None:
    passages = _passages(30, 22, 30, start=5)
    for chunk in (None, 4):
        seen: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}

        def reader(index: int, first: int, logits: Tensor) -> None:
            assert first == 5 + sum(map(len, seen[index]))  # noqa: B023 - called within this turn of the loop
            seen[index].append(logits)  # noqa: B023

        scoring = Engine(load(), Tova(), 12, rows=3).score(passages, chunk, reader=reader)
        for index, passage in enumerate(passages):
            logits = torch.cat(seen[index])
            targets = torch.tensor(passage.tokens[5:])
            mine = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            torch.testing.assert_close(mine, torch.tensor(scoring.scores[index].logprobs))


@pytest.mark.parametrize("kind", ["qwen3_sliding", "gemma3"])
def test_sliding_layers_keep_their_window(kind: str) -> None:
    (passage,) = _passages(60)
    logits = dense(load(kind), torch.tensor([passage.tokens]))[0]
    for policy, budget in ((Full(), None), (Tova(), 59), (Random(), 59)):
        for chunk in (None, 1):
            score = Engine(load(kind), policy, budget).score([passage], chunk).scores[0]
            torch.testing.assert_close(torch.tensor(score.logprobs), _expected(logits, passage), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("passages", "chunk", "told"),
    [
        ([], None, "list of passages is empty"),
        ([Passage((1,))], None, "one before it"),
        ([Passage((1, 2), 0)], None, "one before it"),
        ([Passage((1, 2, 3))], 0, "between 1 and 12 tokens"),
        ([Passage((1, 2, 3))], 13, "between 1 and 12 tokens"),
        ([Passage((1,) * 3000)], None, "needs 2999 positions"),
    ],
)
def test_what_cannot_be_scored_is_refused(passages: list[Passage], chunk: int | None, told: str) -> None:
    with pytest.raises(KvbenchError, match=told):
        Engine(load(), Tova(), 12).score(passages, chunk)
