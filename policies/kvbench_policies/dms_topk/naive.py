"""What the running top-k of given gate scores keeps, one token at a time. Tests only."""

from __future__ import annotations


def streamed_sets(scores: list[float], sinks: int, window: int, k: int) -> list[set[int]]:
    """The tokens of one head retained at each step: of those outside sinks and window, the k best, the newer on a tie."""
    steps = []
    for query in range(len(scores)):
        recent = set(range(max(0, query - window + 1), query + 1))
        old = sorted(range(sinks, query - window + 1), key=lambda t: (scores[t], t), reverse=True)
        steps.append(set(range(min(sinks, query + 1))) | recent | set(old[:k]))
    return steps
