"""The gate of one layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvbench.core.policy import Gate


class DmsGate(Gate):
    """`a^T silu(W x + b) + c` of `x = [k; v]`, separate weights per KV head: the log-odds of keeping the token.

    `kvpop_mlp`'s scorer with the constant c, which a decision needs and a ranking does not. The last layer starts at zero.

    Args:
        kv_heads: H.
        head_dim: D.
        hidden: width of the layer between.
        temperature: of the relaxation.
        detached: hands no gradient back to keys and values.
    """

    def __init__(self, kv_heads: int, head_dim: int, hidden: int, temperature: float, detached: bool) -> None:
        super().__init__()
        bound = (2 * head_dim) ** -0.5
        self.inner = nn.Parameter(torch.empty(kv_heads, 2 * head_dim, hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(kv_heads, 1, hidden))
        self.outer = nn.Parameter(torch.zeros(kv_heads, hidden, 1))
        self.constant = nn.Parameter(torch.zeros(kv_heads, 1, 1))
        self.temperature = temperature
        self.detached = detached

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Scores [R, H, S] in fp32 from [R, H, S, D]; each depends on its own token only."""
        rows, heads, size, _ = keys.shape
        # Heads lead, so that one batched product serves all rows without a copy of the weights for each.
        with torch.autocast(keys.device.type, enabled=False):
            x = torch.cat((keys.transpose(0, 1), values.transpose(0, 1)), -1).reshape(heads, rows * size, -1)
            hidden = nn.functional.silu(torch.baddbmm(self.bias, x.float(), self.inner))
            return torch.baddbmm(self.constant, hidden, self.outer).view(heads, rows, size).transpose(0, 1)
