from __future__ import annotations

import pytest
import torch

from kvbench.core.slots import Slots
from kvbench_policies.tova import Tova
from tests.engine.tiny import feed, load, text
from tests.policies import tova_oracle


@pytest.mark.parametrize(("kind", "kv_heads"), [("qwen3", 2), ("llama", 4), ("llama", 1)])
def test_token_by_token_equals_the_oracle(kind: str, kv_heads: int) -> None:
    loaded, ids, budget = load(kind, kv_heads=kv_heads), text(1, 45), 10
    trace = feed(loaded, Tova(), budget, ids)
    for place, (logits, kept) in enumerate(tova_oracle.run(loaded, budget, False, ids, list(range(1, 46)))):
        assert trace.kept[place] == kept, place
        torch.testing.assert_close(trace.logits[0, place], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("budget", "chunk"), [(10, 1), (16, 2), (32, 4)])
@pytest.mark.parametrize("over", [-3, 0, 1, 5, 12])
def test_prompts_equal_the_oracle(budget: int, chunk: int, over: int) -> None:
    """The first piece fills the budget, the next ones have an eighth of it."""
    prompt = budget + over
    loaded, ids = load(), text(1, prompt + 4)
    edges = sorted({min(budget, prompt), *range(budget + chunk, prompt, chunk), *range(prompt, prompt + 5)})
    trace = feed(loaded, Tova(), budget, ids, prompt)
    answers = list(tova_oracle.run(loaded, budget, False, ids, edges))[edges.index(prompt) :]
    for place, (logits, kept) in enumerate(answers):
        assert trace.kept[place] == kept, place
        torch.testing.assert_close(trace.logits[0, place], logits, atol=1e-4, rtol=1e-4)


def test_all_heads_of_a_layer_drop_the_same_token() -> None:
    trace = feed(load(), Tova(), 10, text(2, 40), 25)
    layers = [layer for sets in trace.kept for layer in sets]
    assert all(row[0] == row[1] for layer in layers for row in layer)
    assert any(sets[0] != sets[1] for sets in trace.kept), "layers decide for themselves"


def test_the_mean_is_over_all_query_heads() -> None:
    """The second head is sure of slot 0, the first prefers slot 1 a little: their sum decides."""
    slots = Slots.empty(1, 2, 3, 4, 0, 1, torch.float32, torch.device("cpu"))
    slots.positions[...] = torch.arange(3)
    weights = torch.tensor([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.9, 0.05, 0.05], [0.1, 0.1, 0.8]])[None, :, None]
    policy = Tova()
    geometry = load().geometry
    assert policy.split(3, geometry).window == 1
    state = policy.state(None)  # type: ignore[arg-type]
    state.observe(weights, slots)
    torch.testing.assert_close(slots.priority, torch.tensor([0.3, 0.1375, 0.5625]).expand(1, 2, 3))
