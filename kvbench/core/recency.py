"""The priority of StreamingLLM: the newer a token, the longer it stays."""

from __future__ import annotations

from torch import Tensor

from kvbench.core.policy import PointwiseState, Tokens


class RecencyState(PointwiseState):
    """Priority = position, exact in fp32 up to 2**24 tokens."""

    def priority(self, tokens: Tokens) -> Tensor:
        """Positions as fp32, the same for every head [R, H, T]."""
        return tokens.positions[:, None].float().expand(tokens.keys.shape[:3])
