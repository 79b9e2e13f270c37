"""TOVA with a ranking of its own in each KV head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.core.policy import Geometry, ObservedState, Policy, Split, StateRequest
from kvbench.core.slots import Slots


@dataclass(frozen=True)
class TovaHead(Policy):
    """Like `tova`, but averaged only over the query heads that share a KV head, so that heads drop different tokens.

    A variant that Oren et al. (2024) compare with and do not recommend; conventions are those of `tova`.
    """

    name: ClassVar[str] = "tova_head"
    static: ClassVar[bool] = False

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=0, window=1)

    def state(self, request: StateRequest) -> TovaHeadState:
        return TovaHeadState()


class TovaHeadState(ObservedState):
    """Priority = the last query's attention, averaged over the group [R, H, B]."""

    def observe(self, weights: Tensor, slots: Slots) -> None:
        rows, _, _, size = weights.shape
        slots.set_priority(weights[:, :, -1].view(rows, slots.keys.shape[1], -1, size).mean(2))
