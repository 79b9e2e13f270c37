from __future__ import annotations

import pytest

from kvbench.core.errors import KvbenchError
from kvbench_policies.streaming_llm import StreamingLlm
from tests.engine.tiny import feed, load, text


@pytest.mark.parametrize(("sinks", "budget"), [(4, 12), (0, 12), (1, 3), (10, 12)])
@pytest.mark.parametrize("prompt", [1, 30])
def test_the_first_and_the_newest_are_kept(sinks: int, budget: int, prompt: int) -> None:
    trace = feed(load(), StreamingLlm(sinks=sinks), budget, text(1, 45), prompt)
    for place, layers in enumerate(trace.kept, start=prompt - 1):
        expected = frozenset(range(min(sinks, place + 1))) | frozenset(
            range(max(0, place - (budget - sinks) + 1), place + 1)
        )
        assert layers == [[[expected, expected]]] * 2


def test_too_small_a_budget_is_named() -> None:
    geometry = load().geometry
    assert StreamingLlm().smallest_budget(geometry) == 6
    with pytest.raises(KvbenchError, match="at least 6 slots"):
        StreamingLlm().checked_split(5, geometry)
