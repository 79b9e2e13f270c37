"""The linear scorer of one layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvbench.core.decay import AgeDecay, DecayKind
from kvbench.core.policy import Scorer


class LinearScorer(Scorer):
    """`a^T x` of `x = [k; v]`, separate weights per KV head (KVpop, linear scorer; docs/kvpop.md 5.1).

    Starts at zero: every score is equal, and equal scores keep the newest tokens. Differs from KVpop: no constant is
    added to the score, since only scores of the same head are ever compared.

    Args:
        kv_heads: H.
        head_dim: D.
        decay: kind of age decay.
        horizon: length for which the bounds of a learned decay are set.
    """

    def __init__(self, kv_heads: int, head_dim: int, decay: DecayKind = "none", horizon: int = 2048) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(kv_heads, 2 * head_dim, 1))
        self.decay = AgeDecay(decay, kv_heads, horizon)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Scores [R, H, S] in fp32 from [R, H, S, D]; each depends on its own token only."""
        with torch.autocast(keys.device.type, enabled=False):
            return (torch.cat((keys, values), -1).float() @ self.weight)[..., 0]

    def log_decay(self) -> Tensor:
        """Log gamma [H]."""
        log_gamma: Tensor = self.decay()
        return log_gamma
