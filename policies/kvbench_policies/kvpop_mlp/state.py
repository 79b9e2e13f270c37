"""The stateless scorer in one run of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.core.policy import StateRequest, Tokens
from kvbench.core.scored import ScoredState
from kvbench_policies.kvpop_mlp.scorer import MlpScorer


class MlpState(ScoredState):
    """`ScoredState` whose decode step is one kernel where kernels may be used."""

    def __init__(self, scorer: MlpScorer, request: StateRequest) -> None:
        super().__init__(scorer, scorer.decay.active)
        self.scorer: MlpScorer = scorer
        self._kernels = request.kernels
        with torch.no_grad():
            self._log_gamma = scorer.log_decay().float() if scorer.decay.active else None

    @torch.no_grad()
    def step(self, new: Tokens, leaving: Tokens) -> Tensor:
        """Priorities [R, H] of the tokens that leave."""
        if not self._kernels:
            return super().step(new, leaving)
        # Triton is a part of torch for GPUs only.
        from kvbench_policies.kvpop_mlp.kernel import score

        return score(leaving, self.scorer.inner, self.scorer.bias, self.scorer.outer, log_gamma=self._log_gamma)
