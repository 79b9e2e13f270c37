"""The delayed mLSTM scorer of one layer (KVpop; docs/kvpop.md 5.2, 5.3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kvbench.core.decay import AgeDecay
from kvbench.core.policy import Scorer
from kvbench_policies.kvpop.mlstm import Memory, chunkwise

if TYPE_CHECKING:
    from kvbench.core.policy import Geometry
    from kvbench_policies.kvpop.policy import Kvpop

BOUND = 75.0
"""Of gates without a soft bound: beyond it the memory's arithmetic leaves fp32."""


class KvpopScorer(Scorer):
    """Reads `x = [k; v]` of every token into a matrix memory and scores a token when it leaves the window.

    With separate weights per KV head, for the token t that leaves at t + w:

        every token j <= t + w writes k_j = phi(W_k x_j), v_j = W_v x_j
                    with gates i_j = cap(w_i x_j + b_i), f_j = cap(w_f x_j + b_f)
        y_t = what q_t = phi(W_q x_t) reads from the memory after token t + w (mlstm.py)
        score_t = a^T silu(W_o norm(y_t) + W_s x_t + b)

    phi(z) = [softmax(z); softmax(-z)] (Hedgehog as KVpop describes it) or softmax(z), cap(g) = c tanh(g / c). Without a value
    projection v_j is the cached value.

    The readout is our composition of the parts that the paper names: head norm, skip connection from the delayed
    token, SiLU with bias, final projection that starts at zero (then every score is equal and the newest tokens
    stay). Its norm has no weights, since W_o follows, and the score no constant, since only scores of the same
    head are compared.

    Args:
        options: the policy's hyper-parameters.
        geometry: of the model.
    """

    def __init__(self, options: Kvpop, geometry: Geometry) -> None:
        super().__init__()
        heads, size = geometry.kv_heads, 2 * geometry.head_dim
        self.delay = options.delay
        self.features, self.width, self.cap = options.features, options.width(geometry), options.gate_cap
        self.head_norm = options.head_norm
        self.signed = options.feature_map == "hedgehog"
        projected = options.features // 2 if self.signed else options.features
        self.key = nn.Parameter(_truncated_identity(heads, size, projected, 0))
        self.query = nn.Parameter(_truncated_identity(heads, size, projected, 0))
        self.value = (
            nn.Parameter(_truncated_identity(heads, size, self.width, geometry.head_dim))
            if options.value_projection
            else None
        )
        self.gates = nn.Parameter(torch.zeros(heads, size, 2))
        # A forget bias of ln(w) makes the memory last about as long as the window: 1 / (1 - sigmoid(ln w)) = w + 1.
        self.gate_bias = nn.Parameter(torch.tensor([0.0, math.log(options.window)]).repeat(heads, 1, 1))
        self.mix = nn.Parameter(_uniform(heads, self.width, options.hidden))
        self.skip = nn.Parameter(_uniform(heads, size, options.hidden)) if options.skip else None
        self.bias = nn.Parameter(torch.zeros(heads, 1, options.hidden))
        self.final = nn.Parameter(torch.zeros(heads, options.hidden, 1))
        self.decay = AgeDecay(options.decay, heads, options.horizon)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Scores [R, H, S] in fp32 from [R, H, S, D]; 0 for tokens that have not left the window."""
        return self.scan(keys, values)[0]

    def scan(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Memory]:
        """Scores [R, H, S] and the memory after the last token, from [R, H, S, D]."""
        rows, heads, size, _ = keys.shape
        with torch.autocast(keys.device.type, enabled=False):
            # Heads lead, so that one batched product serves all rows without a copy of the weights for each.
            x = torch.cat((keys.transpose(0, 1), values.transpose(0, 1)), -1).reshape(heads, rows * size, -1)
            (write, write_bias), (read, read_bias) = self.writing(), self.reading()
            both = torch.baddbmm(torch.cat((write_bias, read_bias), -1), x.float(), torch.cat((write, read), -1))
            both = both.view(heads, rows, size, -1)
            written, wanted = both[..., : write.shape[-1]], both[..., write.shape[-1] :]
            v, i, f = self.split_written(written)
            # Row t + w reads for token t, which is the causal mLSTM with queries shifted by w.
            q = nn.functional.pad(self.phi(wanted), (0, 0, self.delay, 0))[..., :size, :]
            y, memory = chunkwise(q, self.phi(written), v, i, f)
            scored = max(0, size - self.delay)
            y, skip = y[..., size - scored :, :], self.split_read(wanted)[..., :scored, :]
            scores = self.readout(y.flatten(1, 2), skip.flatten(1, 2)).view(heads, rows, scored)
            scores = nn.functional.pad(scores, (0, size - scored)).transpose(0, 1)
            return scores, Memory(memory.cells.transpose(0, 1), memory.m.transpose(0, 1))

    def writing(self) -> tuple[Tensor, Tensor]:
        """Weight [H, 2D, O] and bias [H, 1, O] of what the written token gives: z, -z, values, 1, both gates."""
        heads, size, _ = self.key.shape
        value: Tensor | None = self.value
        if value is None:
            value = torch.eye(size, device=self.key.device)[:, size // 2 :].expand(heads, -1, -1)
        # A column of zeros with bias 1 gives the values their final 1; both signs of z make phi a single softmax.
        ones, cap = self.key.new_zeros(heads, size, 1), self.cap or 1.0
        weight = torch.cat((self._projected(self.key), value, ones, self.gates / cap), -1)
        before = self.key.new_zeros(heads, 1, self.features + self.width)
        return weight, torch.cat((before, before.new_ones(heads, 1, 1), self.gate_bias / cap), -1)

    def reading(self) -> tuple[Tensor, Tensor]:
        """Weight [H, 2D, O] and bias [H, 1, O] of what the scored token gives: z, -z, its part of the readout."""
        heads, size, _ = self.query.shape
        skip = self.query.new_zeros(heads, size, self.bias.shape[-1]) if self.skip is None else self.skip
        weight = torch.cat((self._projected(self.query), skip), -1)
        return weight, torch.cat((self.query.new_zeros(heads, 1, self.features), self.bias), -1)

    def _projected(self, weight: Tensor) -> Tensor:
        """What gives z and, for signed features, -z [H, 2D, dphi]."""
        return torch.cat((weight, -weight), -1) if self.signed else weight

    def phi(self, given: Tensor) -> Tensor:
        """Features [..., dphi] from z, and -z for signed features, at the start of what a token gives [..., O]."""
        both = given[..., : self.features]
        if not self.signed:
            return both.softmax(-1)
        return both.reshape(*both.shape[:-1], 2, self.features // 2).softmax(-1).view(both.shape)

    def split_written(self, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values with their 1 [..., dv + 1] and gates i and f [...] from what a written token gives [..., O]."""
        end = self.features + self.width + 1
        gates = given[..., end : end + 2]
        gates = self.cap * gates.tanh() if self.cap else gates.clamp(-BOUND, BOUND)
        return given[..., self.features : end], gates[..., 0], gates[..., 1]

    def split_read(self, given: Tensor) -> Tensor:
        """Its part of the readout [..., hidden] from what a scored token gives [..., O]."""
        return given[..., self.features : self.features + self.bias.shape[-1]]

    def readout(self, y: Tensor, skip: Tensor) -> Tensor:
        """Scores [H, N, 1] from what was read [H, N, dv] and the skip part [H, N, hidden]."""
        if self.head_norm:
            y = nn.functional.layer_norm(y, y.shape[-1:])
        return torch.bmm(nn.functional.silu(torch.baddbmm(skip, y, self.mix)), self.final)

    def log_decay(self) -> Tensor:
        """Log gamma [H]."""
        log_gamma: Tensor = self.decay()
        return log_gamma


def _truncated_identity(heads: int, size: int, width: int, first: int) -> Tensor:
    """Copies inputs `first`, `first` + 1, ... to as many outputs as fit, with a little noise [H, size, width]."""
    weight = torch.randn(heads, size, width) * 0.02
    weight[:, first:] += torch.eye(size - first, width)
    return weight


def _uniform(heads: int, size: int, width: int) -> Tensor:
    """Uniform within size**-0.5 [H, size, width]."""
    return torch.empty(heads, size, width).uniform_(-(size**-0.5), size**-0.5)
