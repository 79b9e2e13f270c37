"""A policy of a third party: the older a token, the longer it stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.core.policy import Geometry, PointwiseState, Policy, Split, StateRequest, Tokens


class OldestState(PointwiseState):
    """Priority falls with the position."""

    def priority(self, tokens: Tokens) -> Tensor:
        heads = tokens.keys.shape[1]
        return -tokens.positions[:, None].float().expand(-1, heads, -1)


@dataclass(frozen=True)
class DemoOldest(Policy):
    """Keeps the oldest tokens and a window of the newest."""

    name: ClassVar[str] = "demo_oldest"
    window: int = 4

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=0, window=self.window)

    def state(self, request: StateRequest) -> OldestState:
        return OldestState()
