"""StreamingLLM: attention sinks and a sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.core.policy import Geometry, Policy, Split, StateRequest
from kvbench.core.recency import RecencyState


@dataclass(frozen=True)
class StreamingLlm(Policy):
    """Keeps the first `sinks` tokens and the newest (budget - sinks), in every layer and head.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023). Differs from the published code: keys
    keep the rotation of their original position, where the paper rotates by the position in the cache; the two differ
    only beyond the context a model was trained on.
    """

    name: ClassVar[str] = "streaming_llm"
    sinks: int = 4

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=self.sinks, window=1)

    def state(self, request: StateRequest) -> RecencyState:
        return RecencyState()
