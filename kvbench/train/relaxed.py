"""Gates while they are trained: decisions with logistic noise, soft enough for a gradient (DMS; docs/kvpop.md 9).

Shapes: R rows, H KV heads, S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.hashing import uniform
from kvbench.core.policy import Split


@dataclass(frozen=True)
class GateStep:
    """How gates decide in one step.

    Attributes:
        offset: what a score has to exceed for the token to stay.
        soft: relaxed decisions with noise; otherwise the decisions themselves.
        stream: names the step's random numbers.
        names: of the rows in the step [R], int64, so that a row's noise does not depend on its company.
        tokens: that leave the window in the whole step, of which these rows may be one process's part.
    """

    offset: float
    soft: bool
    stream: int
    names: Tensor
    tokens: int

    def relax(self, score: Tensor, layer: int, temperature: float) -> Tensor:
        """Log-odds that each gate is closed, with logistic noise, over the temperature [R, H, S]."""
        _, heads, size = score.shape
        counters = (
            self.names[:, None, None],
            torch.full((1,), self.stream, device=score.device),
            torch.full((1,), layer, device=score.device),
            torch.arange(heads, device=score.device)[:, None],
            torch.arange(size, device=score.device),
        )
        noise = uniform(*counters)
        return (self.offset - score + noise.log() - (-noise).log1p()) / temperature


def leaving(lengths: Tensor, size: int, split: Split) -> Tensor:
    """Tokens [R, S], bool, that a gate decides about: neither sinks nor still in the window when the row ends."""
    token = torch.arange(size, device=lengths.device)
    return (token >= split.sinks) & (token < lengths[:, None] - split.window)


def bias(closed: Tensor, split: Split) -> Tensor:
    """What is added to the logits of each token once it has left the window [R, H, S]: log(1 - closed), 0 for sinks.

    `closed` are log-odds [R, H, S].
    """
    token = torch.arange(closed.shape[-1], device=closed.device)
    return torch.nn.functional.logsigmoid(-closed).masked_fill(token < split.sinks, 0.0)


def closed_share(closed: Tensor, lengths: Tensor, split: Split, tokens: int) -> Tensor:
    """Share of closed gates among those that decide, hard decisions with the gradient of the soft ones; a scalar.

    Args:
        closed: log-odds [R, H, S].
        lengths: true length of each row [R].
        split: of the budget.
        tokens: that leave the window in the whole step.
    """
    soft = closed.sigmoid()
    hard = (closed > 0).float() + soft - soft.detach()
    decided = leaving(lengths, closed.shape[-1], split)[:, None]
    return (hard * decided).sum() / max(1, tokens * closed.shape[1])


def target_share(split_share: float, progress: float, ramp: float) -> float:
    """Share of tokens to be dropped at a point of the training: the compression ratio rises linearly from 1.

    Args:
        split_share: share that is kept in the end.
        progress: of the training, 0 to 1.
        ramp: share of the training after which the ratio is reached.
    """
    final = 1 / split_share
    ratio = 1 + (final - 1) * min(1.0, progress / ramp if ramp else 1.0)
    return 1 - 1 / ratio
