"""H2O: keep the tokens that have drawn most attention so far, and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Geometry, ObservedState, Policy, Split, StateRequest
from kvbench.core.slots import Slots


@dataclass(frozen=True)
class H2o(Policy):
    """The victim has the smallest sum of the attention weights that it ever received, in each KV head by itself.

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (2023). The share
    `recent` of the budget protects the newest tokens; half, as published. Weights are summed over the query heads of a KV
    head, where the published models have one each.
    """

    name: ClassVar[str] = "h2o"
    static: ClassVar[bool] = False
    recent: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.recent < 1:
            raise KvbenchError(f"The argument recent={self.recent} of policy 'h2o' has to be in 0 <= recent < 1.")

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=0, window=max(1, int(self.recent * budget)))

    def smallest_budget(self, geometry: Geometry) -> int:
        return next(budget for budget in range(2, 1 << 30) if self.split(budget, geometry).long >= 1)

    def state(self, request: StateRequest) -> H2oState:
        return H2oState(request)


class H2oState(ObservedState):
    """The sum so far of what each slot holds [R, H, B], and the position it belongs to."""

    def __init__(self, request: StateRequest) -> None:
        shape = (request.rows, request.geometry.kv_heads, request.split.slots)
        self._sum = torch.zeros(shape, device=request.device)
        self._owner = torch.full(shape, -1, dtype=torch.int32, device=request.device)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._sum, self._owner

    def observe(self, weights: Tensor, slots: Slots) -> None:
        rows, heads, extent = len(weights), slots.keys.shape[1], weights.shape[-1]
        received = weights.reshape(rows, heads, -1, extent).sum(2)
        total, owner, held = self._sum[..., :extent], self._owner[..., :extent], slots.positions[..., :extent]
        total.copy_(torch.where(owner == held, total, 0.0) + received)
        owner.copy_(held)
        slots.set_priority(total)
