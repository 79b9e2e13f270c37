"""Knorm: keep the tokens whose keys are short."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.core.policy import Geometry, PointwiseState, Policy, Split, StateRequest, Tokens


@dataclass(frozen=True)
class Knorm(Policy):
    """The victim has the longest key (L2 norm), in each KV head by itself.

    Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (2024), which found that keys
    of small norm draw much attention. As published, neither sinks nor recent tokens are protected, so that fed one by one
    a token may be gone a step after it came; `window` protects the newest ones. Differs from the published experiments,
    some of which leave the first layers uncompressed: here all layers have the same budget.
    """

    name: ClassVar[str] = "knorm"
    window: int = 1

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=0, window=self.window)

    def state(self, request: StateRequest) -> KnormState:
        return KnormState()


class KnormState(PointwiseState):
    """Priority falls with |k|; rotation leaves a norm as it is, so keys after RoPE serve.

    In the first layer a token's key has the same norm wherever the token stands, but for rounding. Norms within about a
    thousandth of each other therefore count as equal, and the older token leaves.
    """

    def priority(self, tokens: Tokens) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(tokens.keys.float(), dim=-1)
        return -length.log().round(decimals=3)
