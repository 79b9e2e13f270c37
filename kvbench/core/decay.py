"""How a learned score loses weight with age: one log gamma per KV head (docs/kvpop.md 2.1, 4.5)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

DecayKind = Literal["none", "fixed", "learned"]

_FIXED = math.log1p(-1e-5)


class AgeDecay(nn.Module):
    """log gamma of each KV head, at most 0.

    `none` is 0, `fixed` is log(1 - 1e-5), `learned` stays within -ln(100)/S and -ln(2)/(8 S) for the length
    S = `horizon`: student and teacher share gamma, so without narrow bounds training can lower its loss by
    letting every newcomer win.

    Differs from KVpop: the bounds are interpolated in log gamma and not in gamma, where fp32 has few digits left
    so near to 1.
    """

    floating: Tensor | None
    constant: Tensor

    def __init__(self, kind: DecayKind, kv_heads: int, horizon: int) -> None:
        super().__init__()
        self.active = kind != "none"
        self.lowest = -math.log(100) / horizon
        self.highest = -math.log(2) / (8 * horizon)
        self.floating = nn.Parameter(torch.zeros(kv_heads)) if kind == "learned" else None
        fixed = torch.full((kv_heads,), _FIXED if kind == "fixed" else 0.0)
        self.register_buffer("constant", fixed, persistent=False)

    def forward(self) -> Tensor:
        """Log gamma [H], fp32."""
        if self.floating is None:
            return self.constant
        return self.lowest + (self.highest - self.lowest) * self.floating.float().sigmoid()
