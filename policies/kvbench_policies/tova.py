"""TOVA: drop what the last query attends to least, the same token in all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.core.policy import Geometry, ObservedState, Policy, Split, StateRequest
from kvbench.core.slots import Slots


@dataclass(frozen=True)
class Tova(Policy):
    """The victim has the lowest attention weight of the previous step, averaged over all query heads of the layer.

    Oren et al., "Transformers are Multi-State RNNs" (2024). Neither sinks nor a window are protected; the newcomer has no
    rank at its own step. Differs from the published code, which attends over its B kept tokens and the new one and then
    drops: here attention never covers more than B entries, so that B slots are the published method with a cache of B - 1.
    """

    name: ClassVar[str] = "tova"
    static: ClassVar[bool] = False

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=0, window=1)

    def state(self, request: StateRequest) -> TovaState:
        return TovaState()


class TovaState(ObservedState):
    """Priority = the last query's attention, one ranking a layer."""

    def observe(self, weights: Tensor, slots: Slots) -> None:
        ranking = weights[:, :, -1].mean(1, keepdim=True)
        slots.set_priority(ranking.expand(-1, slots.keys.shape[1], -1))
