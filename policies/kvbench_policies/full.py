"""The dense cache: as many slots as tokens, nothing is evicted. The denominator of every relative number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.core.policy import Geometry, Policy, Split, State, StateRequest


@dataclass(frozen=True)
class Full(Policy):
    """Keeps everything, through the same engine as every other policy."""

    name: ClassVar[str] = "full"

    @property
    def evicts(self) -> bool:
        return False

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=0, window=1)

    def state(self, request: StateRequest) -> State:
        return State()
