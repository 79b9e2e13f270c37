"""The stateless two-layer scorer of one layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvbench.core.decay import AgeDecay, DecayKind
from kvbench.core.policy import Scorer


class MlpScorer(Scorer):
    """`a^T silu(W x + b)` of `x = [k; v]`, separate weights per KV head (KVpop, stateless scorer; docs/kvpop.md 5.1).

    The last layer starts at zero: every score is equal, and equal scores keep the newest tokens. Differs from
    KVpop: no constant is added to the score, since only scores of the same head are ever compared.

    Args:
        kv_heads: H.
        head_dim: D.
        hidden: width of the layer between.
        decay: kind of age decay.
        horizon: length for which the bounds of a learned decay are set.
    """

    def __init__(
        self, kv_heads: int, head_dim: int, hidden: int, decay: DecayKind = "none", horizon: int = 2048
    ) -> None:
        super().__init__()
        bound = (2 * head_dim) ** -0.5
        self.inner = nn.Parameter(torch.empty(kv_heads, 2 * head_dim, hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(kv_heads, 1, hidden))
        self.outer = nn.Parameter(torch.zeros(kv_heads, hidden, 1))
        self.decay = AgeDecay(decay, kv_heads, horizon)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Scores [R, H, S] in fp32 from [R, H, S, D]; each depends on its own token only."""
        rows, heads, size, _ = keys.shape
        # Heads lead, so that one batched product serves all rows without a copy of the weights for each.
        with torch.autocast(keys.device.type, enabled=False):
            x = torch.cat((keys.transpose(0, 1), values.transpose(0, 1)), -1).reshape(heads, rows * size, -1)
            hidden = nn.functional.silu(torch.baddbmm(self.bias, x.float(), self.inner))
            return torch.bmm(hidden, self.outer).view(heads, rows, size).transpose(0, 1)

    def log_decay(self) -> Tensor:
        """Log gamma [H]."""
        log_gamma: Tensor = self.decay()
        return log_gamma
