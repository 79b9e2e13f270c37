from __future__ import annotations

import pytest
import torch

from kvbench_policies.tova_head import TovaHead
from tests.engine.tiny import feed, load, text
from tests.policies import tova_oracle


@pytest.mark.parametrize(("kind", "kv_heads"), [("qwen3", 2), ("llama", 4), ("llama", 1)])
def test_token_by_token_equals_the_oracle(kind: str, kv_heads: int) -> None:
    loaded, ids, budget = load(kind, kv_heads=kv_heads), text(1, 45), 10
    trace = feed(loaded, TovaHead(), budget, ids)
    for place, (logits, kept) in enumerate(tova_oracle.run(loaded, budget, True, ids, list(range(1, 46)))):
        assert trace.kept[place] == kept, place
        torch.testing.assert_close(trace.logits[0, place], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("budget", "chunk", "over"), [(10, 1, 5), (32, 4, 6), (32, 4, 12)])
def test_prompts_equal_the_oracle(budget: int, chunk: int, over: int) -> None:
    prompt = budget + over
    loaded, ids = load(), text(1, prompt + 4)
    edges = sorted({budget, *range(budget + chunk, prompt, chunk), *range(prompt, prompt + 5)})
    trace = feed(loaded, TovaHead(), budget, ids, prompt)
    answers = list(tova_oracle.run(loaded, budget, True, ids, edges))[edges.index(prompt) :]
    for place, (logits, kept) in enumerate(answers):
        assert trace.kept[place] == kept, place
        torch.testing.assert_close(trace.logits[0, place], logits, atol=1e-4, rtol=1e-4)


def test_heads_drop_different_tokens() -> None:
    trace = feed(load(), TovaHead(), 10, text(1, 40), 25)
    assert any(row[0] != row[1] for sets in trace.kept for layer in sets for row in layer)
