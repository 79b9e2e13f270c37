"""A scorer's static priority without memory: shared by every policy whose score depends on the token alone."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import LearnedPolicy, PointwiseState, Scorer, StateRequest, Tokens

T = TypeVar("T", bound=nn.Module)


class ScoredState(PointwiseState):
    """Scores a token when it leaves the window, from its cached key and value; keeps nothing between steps."""

    def __init__(self, scorer: Scorer, decays: bool = False) -> None:
        self.scorer = scorer
        self.decays = decays

    @torch.no_grad()
    def priority(self, tokens: Tokens) -> Tensor:
        """Priorities [R, H, T] in fp32."""
        scores: Tensor = self.scorer(tokens.keys, tokens.values)
        return self.scorer.priority(scores, tokens.positions) if self.decays else scores


def trained(policy: LearnedPolicy, request: StateRequest, kind: type[T]) -> T:
    """The layer's trained scorer.

    Raises:
        KvbenchError: the request has no scorer of this policy.
    """
    if not isinstance(request.scorer, kind):
        raise KvbenchError(
            f"Policy '{policy.name}' needs a trained scorer for layer {request.layer}; give its checkpoint."
        )
    return request.scorer
