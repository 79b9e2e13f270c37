"""Random eviction: the floor, and a control that an evaluation notices eviction at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.hashing import uniform
from kvbench.core.policy import Geometry, PointwiseState, Policy, Split, StateRequest, Tokens


@dataclass(frozen=True)
class Random(Policy):
    """Each token draws its priority once from U(0, 1), so that what is kept is a uniform sample of the past (a reservoir).

    Every layer and KV head draws for itself, from a stream that belongs to the request. Only the newest token is protected.
    kvpress' RandomPress draws anew at every compression, which is not a stream policy.
    """

    name: ClassVar[str] = "random"

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=0, window=1)

    def state(self, request: StateRequest) -> RandomState:
        return RandomState(request)


class RandomState(PointwiseState):
    """Priorities are a hash of (request seed, layer, head, position)."""

    def __init__(self, request: StateRequest) -> None:
        # Not copied: the engine rewrites a row's seed in place when it is refilled.
        self._seeds = request.seeds
        heads = torch.arange(request.geometry.kv_heads, device=request.device)
        self._heads = request.layer * request.geometry.kv_heads + heads

    def priority(self, tokens: Tokens) -> Tensor:
        return uniform(self._seeds[:, None, None], self._heads[None, :, None], tokens.positions[:, None])
