"""The Triton kernels by Triton's interpreter against the plain forms; a program of its own, since triton decides at import."""

from __future__ import annotations

import torch

from kvbench.core import ranking
from kvbench.core.future_mass import future_logsumexp, normaliser
from kvbench.kernels.band import Blocks, band_logsumexp
from kvbench.kernels.cutoff import running_cutoff
from tests.kernels.cases import CASES as KEPT

SCALE = 0.3
BLOCKS = Blocks(16, 16, 4, 1)
CASES = [
    # group, tokens, head dimension, window, lookahead, power
    (1, 21, 8, 0, 0, 1.0),
    (4, 37, 20, 5, 0, 8.0),
    (2, 37, 16, 16, 3, 1.0),
    (1, 20, 16, 19, 0, 1.0),
    (1, 20, 16, 20, 2, 2.0),
]


def check(group: int, size: int, dim: int, window: int, lookahead: int, power: float) -> None:
    queries, keys = torch.randn(2, group, size, dim) * 2, torch.randn(2, 1, size, dim) * 2
    lengths, whole = torch.tensor([size, size - 6]), torch.full((2,), size)
    dense = band_logsumexp(queries, keys, None, SCALE, -size, 0, whole, blocks=BLOCKS)
    torch.testing.assert_close(dense, normaliser(queries, keys, SCALE), atol=1e-4, rtol=1e-4)
    last = window + lookahead if lookahead else size
    found = band_logsumexp(keys, queries, dense, SCALE, window, last, lengths, power, blocks=BLOCKS)
    wanted = future_logsumexp(queries, keys, dense, SCALE, window, lengths=lengths, lookahead=lookahead, power=power)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)


def check_cutoff(rows: int, heads: int, size: int, sinks: int, window: int, k: int, values: int) -> None:
    rank = ranking.ranks(torch.randint(values, (rows, heads, size)).float())
    assert torch.equal(running_cutoff(rank, sinks, window, k), ranking.running_cutoff(rank, sinks, window, k))


if __name__ == "__main__":
    torch.manual_seed(0)
    for kept in (*KEPT, (1, 2, 700, 4, 48, 60, 1000)):
        check_cutoff(*kept)
    for case in CASES:
        check(*case)
