"""Policy `kvpop_mlp`: KVpop with its stateless scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.core.decay import DecayKind
from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Geometry, LearnedPolicy, Split, StateRequest
from kvbench.core.scored import trained
from kvbench_policies.kvpop_mlp.scorer import MlpScorer
from kvbench_policies.kvpop_mlp.state import MlpState


@dataclass(frozen=True)
class KvpopMlp(LearnedPolicy):
    """KVpop's stateless variant: running top-k of a learned score of each token's own key and value (docs/kvpop.md 5.1).

    Attributes:
        sinks: first tokens, never evicted (s).
        window: newest tokens, never evicted (w).
        hidden: width of the scorer; 64 gives about as many parameters as `kvpop`.
        decay: how scores lose weight with age.
        horizon: length for which the bounds of a learned decay are set.
    """

    name: ClassVar[str] = "kvpop_mlp"

    sinks: int = 4
    window: int = 16
    hidden: int = 64
    decay: DecayKind = "none"
    horizon: int = 2048

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise KvbenchError(f"Policy '{self.name}' needs sinks of at least 0, not {self.sinks}.")
        for name, value in (("window", self.window), ("hidden", self.hidden), ("horizon", self.horizon)):
            if value < 1:
                raise KvbenchError(f"Policy '{self.name}' needs {name} of at least 1, not {value}.")
        if self.decay not in ("none", "fixed", "learned"):
            raise KvbenchError(f"Policy '{self.name}' knows decay none, fixed and learned, not {self.decay!r}.")

    def split(self, budget: int, geometry: Geometry) -> Split:
        """All slots hold tokens; nothing is charged."""
        return Split(slots=budget, sinks=self.sinks, window=self.window)

    def scorer(self, geometry: Geometry) -> MlpScorer:
        """An untrained scorer for one layer."""
        return MlpScorer(geometry.kv_heads, geometry.head_dim, self.hidden, self.decay, self.horizon)

    def state(self, request: StateRequest) -> MlpState:
        """Priorities from the layer's trained scorer.

        Raises:
            KvbenchError: the request has no scorer of this policy.
        """
        return MlpState(trained(self, request, MlpScorer), request)
