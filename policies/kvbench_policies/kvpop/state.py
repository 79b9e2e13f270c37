"""The mLSTM scorer's memory in one run of one layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.core.policy import StateRequest, StaticState, Tokens
from kvbench_policies.kvpop.mlstm import Memory, step
from kvbench_policies.kvpop.scorer import BOUND, KvpopScorer

_ALIGNED = 16
"""What a token gives is a multiple of this, so that the kernel reads weights in whole vectors."""


class DelayedState(StaticState):
    """Writes each new token, then scores the one that leaves the window from its cached key and value."""

    def __init__(self, scorer: KvpopScorer, request: StateRequest) -> None:
        self.scorer = scorer
        with torch.no_grad():
            pairs = list(zip(scorer.writing(), scorer.reading(), strict=True))
            if request.kernels:
                pairs = [(_unsigned(write, scorer), _unsigned(read, scorer)) for write, read in pairs]
            self.weight, self.bias = (_interleaved(*pair, _ALIGNED if request.kernels else 1) for pair in pairs)
            self._log_gamma = scorer.log_decay().float() if scorer.decay.active else None
        self._kernels = request.kernels
        shape = (request.rows, request.geometry.kv_heads)
        memory = Memory.empty(shape, scorer.features, scorer.width + 1, request.device)
        # What is charged in slots is stored as keys and values are; every update computes in fp32.
        self.memory = memory._replace(cells=memory.cells.to(request.dtype))

    def tensors(self) -> tuple[Tensor, ...]:
        """[C n]^T [R, H, dv + 1, dphi], which is charged to the budget, and the stabiliser m [R, H]."""
        return self.memory

    def charged(self) -> tuple[Tensor, ...]:
        """C and n; m is one number a head."""
        return (self.memory.cells,)

    @torch.no_grad()
    def step(self, new: Tokens, leaving: Tokens) -> Tensor:
        """Priorities [R, H] of the tokens that leave."""
        if self._kernels:
            return self._by_kernel(new, leaving, leaving.positions)[..., 0]
        return self._decayed(self._write_and_read(new, leaving), leaving.positions)[..., 0]

    @torch.no_grad()
    def prefill(self, tokens: Tokens) -> Tensor:
        """Priorities [R, H, T]; 0 or decayed 0 for the last `window` tokens."""
        scores, memory = self.scorer.scan(tokens.keys, tokens.values)
        self._store(memory)
        return self._decayed(scores, tokens.positions)

    def _write_and_read(self, new: Tokens, leaving: Tokens) -> Tensor:
        """Writes `new` and returns the score of `leaving` [R, H, 1]."""
        if self._kernels:
            return self._by_kernel(new, leaving, None)
        scorer, (rows, heads) = self.scorer, self.memory.m.shape
        # One product for both tokens, as separate members of a batch [2H, R, 2D]: head 0 new, head 0 leaving, ...
        x = torch.cat((new.keys, new.values, leaving.keys, leaving.values), -1).float()
        given = torch.baddbmm(self.bias, x.reshape(rows, 2 * heads, -1).transpose(0, 1), self.weight)
        by_row = given.transpose(0, 1)
        features = scorer.phi(by_row)
        v, i, f = scorer.split_written(by_row[:, ::2])
        memory = self.memory._replace(cells=self.memory.cells.float())
        y = step(memory, features[:, 1::2], features[:, ::2], v, i, f)
        self.memory.cells.copy_(memory.cells)
        return scorer.readout(y.transpose(0, 1), scorer.split_read(given[1::2])).transpose(0, 1)

    def _by_kernel(self, new: Tokens, leaving: Tokens, positions: Tensor | None) -> Tensor:
        """`_write_and_read` in two or three launches; decayed to `positions` [R, 1] where they are given and scores decay."""
        from kvbench_policies.kvpop.kernel import write_and_read

        scorer, gamma = self.scorer, self._log_gamma
        return write_and_read(
            (new.keys, new.values),
            (leaving.keys, leaving.values),
            self.weight,
            self.bias,
            self.memory.cells,
            self.memory.m,
            scorer.mix,
            scorer.final,
            None if gamma is None or positions is None else (gamma, positions),
            cap=scorer.cap,
            bound=BOUND,
            signed=scorer.signed,
            norm=scorer.head_norm,
        )

    def _store(self, memory: Memory) -> None:
        # In place: a captured CUDA graph and the engine's refills keep the addresses.
        self.memory.cells.copy_(memory.cells)
        self.memory.m.copy_(memory.m)

    def _decayed(self, scores: Tensor, positions: Tensor) -> Tensor:
        return self.scorer.priority(scores, positions) if self.scorer.decay.active else scores


class ImmediateState(DelayedState):
    """Scores each token when it is written, and holds the score back until the token leaves the window."""

    def __init__(self, scorer: KvpopScorer, request: StateRequest) -> None:
        super().__init__(scorer, request)
        self.window = request.split.window
        self.pending = torch.zeros(request.rows, request.geometry.kv_heads, self.window, device=request.device)

    def tensors(self) -> tuple[Tensor, ...]:
        """As delayed, and the scores of the tokens in the window [R, H, w], position p at p % w."""
        return *self.memory, self.pending

    @torch.no_grad()
    def step(self, new: Tokens, leaving: Tokens) -> Tensor:
        """Priorities [R, H] of the tokens that leave."""
        place = self._places(new.positions)
        score = self.pending.gather(-1, place)
        self.pending.scatter_(-1, place, self._write_and_read(new, new))
        return self._decayed(score, leaving.positions)[..., 0]

    @torch.no_grad()
    def prefill(self, tokens: Tokens) -> Tensor:
        """Priorities [R, H, T]."""
        scores, memory = self.scorer.scan(tokens.keys, tokens.values)
        self._store(memory)
        self.pending.scatter_(-1, self._places(tokens.positions[:, -self.window :]), scores[..., -self.window :])
        return self._decayed(scores, tokens.positions)

    def _places(self, positions: Tensor) -> Tensor:
        """Where scores of tokens at `positions` [R, T] are held [R, H, T]."""
        return (positions % self.window).long()[:, None].expand(-1, self.pending.shape[1], -1)


def _unsigned(given: Tensor, scorer: KvpopScorer) -> Tensor:
    """Without the columns of -z [..., O], which the kernel takes from z."""
    if not scorer.signed:
        return given
    return torch.cat((given[..., : scorer.features // 2], given[..., scorer.features :]), -1)


def _interleaved(written: Tensor, read: Tensor, multiple: int) -> Tensor:
    """Weights of the written and of the read token head by head [2H, ..., O]; filled up with zeros to a multiple."""
    wide = -(-max(written.shape[-1], read.shape[-1]) // multiple) * multiple
    pair = [pad(weight, (0, wide - weight.shape[-1])) for weight in (written, read)]
    return torch.stack(pair, 1).flatten(0, 1)
