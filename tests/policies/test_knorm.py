from __future__ import annotations

import pytest
import torch

from kvbench.core.policy import Tokens
from kvbench_policies.knorm import Knorm
from tests.engine.tiny import feed, load, text


def _longest_leave(norms: list[float], budget: int, window: int) -> list[set[int]]:
    """One head, token by token, with a list: before a token comes in, the longest key outside the window leaves."""
    held: list[int] = []
    sets = []
    for place in range(len(norms)):
        if len(held) == budget:
            held.remove(max((p for p in held if p <= place - window), key=lambda p: (norms[p], -p)))
        held.append(place)
        sets.append(set(held))
    return sets


@pytest.mark.parametrize("window", [1, 4])
def test_the_longest_key_leaves(window: int) -> None:
    """The norms are those of the cached keys of a run that keeps everything; only the first layer's do not depend on it."""
    loaded, ids, budget = load(), torch.randperm(64)[None, :45], 10
    keys = feed(loaded, Knorm(), 45, ids).layers[0].slots.keys[0]
    trace = feed(loaded, Knorm(window=window), budget, ids)
    for head in range(2):
        norms = [float(sum(x * x for x in key.tolist()) ** 0.5) for key in keys[head]]
        assert [sets[0][0][head] for sets in trace.kept] == _longest_leave(norms, budget, window)


def test_equal_norms_leave_oldest_first() -> None:
    """The same token again and again has the same key but for its rotation."""
    trace = feed(load(), Knorm(), 6, text(1, 1).expand(1, 30))
    assert trace.kept[-1][0][0] == [frozenset(range(24, 30))] * 2


def test_a_rotation_does_not_matter() -> None:
    keys = torch.randn(1, 2, 5, 8)
    turned = torch.stack([keys[..., 4:], -keys[..., :4]], -2).flatten(-2)
    positions = torch.arange(5)[None]
    state = Knorm().state(None)  # type: ignore[arg-type]
    assert torch.equal(state.priority(Tokens(keys, keys, positions)), state.priority(Tokens(turned, keys, positions)))
