"""Policy `kvpop`: KVpop with its delayed mLSTM scorer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvbench.core.decay import DecayKind
from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Geometry, LearnedPolicy, Split, StateRequest
from kvbench_policies.kvpop.scorer import KvpopScorer
from kvbench_policies.kvpop.state import DelayedState, ImmediateState


@dataclass(frozen=True)
class Kvpop(LearnedPolicy):
    """KVpop: running top-k of a learned score that an mLSTM gives a token when it leaves the window.

    The defaults are for small models: a state of 16 x 9 numbers a head, so that it costs a few per cent of the
    budget as in the paper. docs/kvpop.md 5.2, 5.3; README.md beside this file says what differs.

    Attributes:
        sinks: first tokens, never evicted (s).
        window: newest tokens, never evicted (w); also the delay of the decision.
        features: size of the read and write features (dphi), even.
        values: size of what is written (dv).
        hidden: width of the readout; 32 gives about as many parameters as `kvpop_mlp`.
        feature_map: `hedgehog`, [softmax(z); softmax(-z)] of half as many projected numbers, or `softmax` of as many.
        value_projection: write W_v x; otherwise the cached value itself, and `values` is the head dimension.
        gate_cap: soft bound of both gates; 0 for none (a hard one keeps them in the range of fp32).
        head_norm: normalise what is read.
        skip: let the readout also see the scored token itself.
        scoring: `delayed`, or `immediate` to read for a token at its own step (the ablation).
        decay: how scores lose weight with age.
        horizon: length for which the bounds of a learned decay are set.
    """

    name: ClassVar[str] = "kvpop"

    sinks: int = 4
    window: int = 16
    features: int = 16
    values: int = 8
    hidden: int = 32
    feature_map: Literal["hedgehog", "softmax"] = "hedgehog"
    value_projection: bool = True
    gate_cap: float = 15.0
    head_norm: bool = True
    skip: bool = True
    scoring: Literal["delayed", "immediate"] = "delayed"
    decay: DecayKind = "none"
    horizon: int = 2048

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise KvbenchError(f"Policy '{self.name}' needs sinks of at least 0, not {self.sinks}.")
        for name in ("window", "values", "hidden", "horizon"):
            if getattr(self, name) < 1:
                raise KvbenchError(f"Policy '{self.name}' needs {name} of at least 1, not {getattr(self, name)}.")
        if self.features < 2 or self.features % 2:
            raise KvbenchError(
                f"Policy '{self.name}' needs an even number of features, at least 2, not {self.features}."
            )
        if not 0 <= self.gate_cap < 80:
            raise KvbenchError(f"Policy '{self.name}' needs 0 <= gate_cap < 80, not {self.gate_cap}.")
        if self.feature_map not in ("hedgehog", "softmax"):
            raise KvbenchError(
                f"Policy '{self.name}' knows feature_map hedgehog and softmax, not {self.feature_map!r}."
            )
        if self.scoring not in ("delayed", "immediate"):
            raise KvbenchError(f"Policy '{self.name}' knows scoring delayed and immediate, not {self.scoring!r}.")
        if self.decay not in ("none", "fixed", "learned"):
            raise KvbenchError(f"Policy '{self.name}' knows decay none, fixed and learned, not {self.decay!r}.")

    @property
    def delay(self) -> int:
        """Steps between writing a token and reading for it."""
        return self.window if self.scoring == "delayed" else 0

    def width(self, geometry: Geometry) -> int:
        """Size of what is written (dv)."""
        return self.values if self.value_projection else geometry.head_dim

    def split(self, budget: int, geometry: Geometry) -> Split:
        """Charges C and n in whole slots, in the same number format as keys and values (docs/kvpop.md 6)."""
        charged = math.ceil(self.features * (self.width(geometry) + 1) / (2 * geometry.head_dim))
        return Split(slots=budget - charged, sinks=self.sinks, window=self.window, charged=charged)

    def scorer(self, geometry: Geometry) -> KvpopScorer:
        """An untrained scorer for one layer."""
        return KvpopScorer(self, geometry)

    def state(self, request: StateRequest) -> DelayedState:
        """An empty memory, and priorities from the layer's trained scorer.

        Raises:
            KvbenchError: the request has no scorer of this policy.
        """
        if not isinstance(request.scorer, KvpopScorer):
            raise KvbenchError(
                f"Policy '{self.name}' needs a trained scorer for layer {request.layer}; give its checkpoint."
            )
        kind = DelayedState if self.scoring == "delayed" else ImmediateState
        return kind(request.scorer, request)
