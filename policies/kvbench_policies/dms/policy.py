"""Policy `dms`: every token is kept or dropped by its own gate; memory is matched on average, not bounded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import GatedPolicy, Geometry, PointwiseState, Split, StateRequest
from kvbench.core.scored import trained
from kvbench_policies.dms.gate import DmsGate
from kvbench_policies.dms.state import DmsState

_MOST = 1e4
"""Share of tokens that an offset can drop or keep at most: all but one in so many."""


@dataclass(frozen=True)
class Dms(GatedPolicy):
    """Dynamic Memory Sparsification: a gate per KV head decides for every token whether it is dropped after the window.

    Lancucki et al. 2025, arXiv:2506.05345; docs/kvpop.md 9. The gates drop a share of the tokens, so the cache of a head
    grows with the sequence: the budget holds on average over heads at the reference length, after calibration, and not at
    every step. README.md beside this file says what differs from the paper.

    Attributes:
        sinks: first tokens, never dropped (s).
        window: newest tokens, never dropped (w); the delay between a token's decision and its effect.
        hidden: width of the gate; 64 gives the parameters of `kvpop_mlp` and a constant a head.
        temperature: of the logistic relaxation that trains the gate.
        detached: the gate's gradient does not reach the language model (the ablation; the paper's does).
        shifts: (kept share, shift) pairs that training measured: corrections of the offset that make the kept share true.
    """

    name: ClassVar[str] = "dms"
    hard_budget: ClassVar[bool] = False

    sinks: int = 4
    window: int = 16
    hidden: int = 64
    temperature: float = 0.1
    detached: bool = False
    shifts: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise KvbenchError(f"Policy '{self.name}' needs sinks of at least 0, not {self.sinks}.")
        for name, value in (("window", self.window), ("hidden", self.hidden)):
            if value < 1:
                raise KvbenchError(f"Policy '{self.name}' needs {name} of at least 1, not {value}.")
        if self.temperature <= 0:
            raise KvbenchError(f"Policy '{self.name}' needs a temperature above 0, not {self.temperature}.")
        # JSON has lists only; a hashable policy holds tuples.
        object.__setattr__(self, "shifts", tuple((float(share), float(shift)) for share, shift in self.shifts))

    def split(self, budget: int, geometry: Geometry) -> Split:
        """The split of a policy with the same window under a hard budget: it says which share of the tokens is to stay."""
        return Split(slots=budget, sinks=self.sinks, window=self.window)

    def offset(self, share: float) -> float:
        """Log-odds of being dropped that a gate without an opinion should have, and the measured correction.

        Between two measured shares the correction is interpolated, outside it is that of the nearest.
        """
        if share >= 1:
            return -math.inf
        odds = min(max((1 - share) / max(share, 1 / _MOST), 1 / _MOST), _MOST)
        return math.log(odds) + _interpolated(self.shifts, share)

    def calibrated(self, shifts: Sequence[tuple[float, float]]) -> Self:
        """This policy with these corrections."""
        return dataclasses.replace(self, shifts=tuple(sorted(shifts)))

    def scorer(self, geometry: Geometry) -> DmsGate:
        """An untrained gate for one layer."""
        return DmsGate(geometry.kv_heads, geometry.head_dim, self.hidden, self.temperature, self.detached)

    def state(self, request: StateRequest) -> PointwiseState:
        """Decisions of the layer's trained gate.

        Raises:
            KvbenchError: the request has no gate of this policy.
        """
        return DmsState(trained(self, request, DmsGate), self.offset(request.kept_share), request)


def _interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear between (x, y) points in order of x, constant outside; 0 without points."""
    if not points:
        return 0.0
    below = [point for point in points if point[0] <= at]
    above = [point for point in points if point[0] > at]
    if not below or not above:
        return (above[0] if above else below[-1])[1]
    (x0, y0), (x1, y1) = below[-1], above[0]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
