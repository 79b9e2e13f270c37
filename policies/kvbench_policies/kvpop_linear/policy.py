"""Policy `kvpop_linear`: KVpop with a linear scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.core.decay import DecayKind
from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Geometry, LearnedPolicy, Split, StateRequest
from kvbench.core.scored import ScoredState, trained
from kvbench_policies.kvpop_linear.scorer import LinearScorer


@dataclass(frozen=True)
class KvpopLinear(LearnedPolicy):
    """KVpop's linear variant: running top-k of a linear score of each token's own key and value (docs/kvpop.md 5.1).

    Attributes:
        sinks: first tokens, never evicted (s).
        window: newest tokens, never evicted (w).
        decay: how scores lose weight with age.
        horizon: length for which the bounds of a learned decay are set.
    """

    name: ClassVar[str] = "kvpop_linear"

    sinks: int = 4
    window: int = 16
    decay: DecayKind = "none"
    horizon: int = 2048

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise KvbenchError(f"Policy '{self.name}' needs sinks of at least 0, not {self.sinks}.")
        for name, value in (("window", self.window), ("horizon", self.horizon)):
            if value < 1:
                raise KvbenchError(f"Policy '{self.name}' needs {name} of at least 1, not {value}.")
        if self.decay not in ("none", "fixed", "learned"):
            raise KvbenchError(f"Policy '{self.name}' knows decay none, fixed and learned, not {self.decay!r}.")

    def split(self, budget: int, geometry: Geometry) -> Split:
        """All slots hold tokens; nothing is charged."""
        return Split(slots=budget, sinks=self.sinks, window=self.window)

    def scorer(self, geometry: Geometry) -> LinearScorer:
        """An untrained scorer for one layer."""
        return LinearScorer(geometry.kv_heads, geometry.head_dim, self.decay, self.horizon)

    def state(self, request: StateRequest) -> ScoredState:
        """Priorities from the layer's trained scorer.

        Raises:
            KvbenchError: the request has no scorer of this policy.
        """
        return ScoredState(trained(self, request, LinearScorer), self.decay != "none")
