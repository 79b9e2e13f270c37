"""The gate in one run of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.core.policy import PointwiseState, StateRequest, Tokens
from kvbench_policies.dms.gate import DmsGate


class DmsState(PointwiseState):
    """Priority: a token's score, -inf (gone) where it does not exceed the offset; keeps nothing between steps."""

    def __init__(self, gate: DmsGate, offset: float, request: StateRequest) -> None:
        self.gate = gate
        self.offset = offset
        self._kernels = request.kernels

    @torch.no_grad()
    def priority(self, tokens: Tokens) -> Tensor:
        """Scores [R, H, T], -inf for tokens that are dropped."""
        scores: Tensor = self.gate(tokens.keys, tokens.values)
        return scores.masked_fill(scores <= self.offset, -torch.inf)

    @torch.no_grad()
    def step(self, new: Tokens, leaving: Tokens) -> Tensor:
        """Scores [R, H] of the tokens that leave, likewise."""
        if not self._kernels:
            return super().step(new, leaving)
        # Triton is a part of torch for GPUs only.
        from kvbench_policies.kvpop_mlp.kernel import score

        gate = self.gate
        return score(leaving, gate.inner, gate.bias, gate.outer, gate.constant, offset=self.offset)
