from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbench.core import future_mass as blocked
from kvbench.core import naive
from kvbench.core.future_mass import future_logsumexp, group_target
from kvbench.core.ranking import keep_mask, ranks, running_cutoff

SCALE = 0.5


def future_mass(
    queries: Tensor, keys: Tensor, normaliser: Tensor, scale: float, window: int, block: int = 1024, power: float = 1.0
) -> Tensor:
    sums = future_logsumexp(queries, keys, normaliser, scale, window, block, power=power)
    return blocked.future_mass(sums, window, power=power)


def _inputs(heads: int, kv_heads: int, size: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    return 2 * torch.randn(rows, heads, size, 8), 2 * torch.randn(rows, kv_heads, size, 8)


def _logits(queries: Tensor, keys: Tensor) -> Tensor:
    """Causal logits [R, Hq, S, S] in float64."""
    group = queries.shape[1] // keys.shape[1]
    size = queries.shape[2]
    logits = queries.double() @ keys.double().repeat_interleave(group, 1).mT * SCALE
    return logits.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -torch.inf)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("window", [0, 1, 5, 36, 37, 40])
@pytest.mark.parametrize("block", [1, 7, 16, 1024])
@pytest.mark.parametrize("power", [1.0, 2.5])
def test_equals_the_explicit_softmax(heads: int, kv_heads: int, window: int, block: int, power: float) -> None:
    queries, keys = _inputs(heads, kv_heads, 37)
    normaliser = _logits(queries, keys).logsumexp(-1).float()
    got = future_mass(queries, keys, normaliser, SCALE, window, block, power=power)
    assert got.dtype == torch.float32
    for row in range(2):
        expected = naive.future_mass(queries[row], keys[row], SCALE, window, power=power)
        torch.testing.assert_close(got[row].double(), expected, atol=1e-4, rtol=1e-4)
    assert (got[..., max(0, 37 - window) :] == -torch.inf).all()


def test_all_mass_is_counted_once() -> None:
    queries, keys = _inputs(4, 1, 37)
    normaliser = _logits(queries, keys).logsumexp(-1).float()
    mean = future_mass(queries, keys, normaliser, SCALE, window=0, block=5).exp()
    count = 37 - torch.arange(37)
    torch.testing.assert_close((mean * count).sum(-1), torch.full((2, 4), 37.0))


def test_a_large_power_is_the_largest_single_use() -> None:
    queries, keys = _inputs(2, 1, 37)
    logits = _logits(queries, keys)
    got = future_mass(queries, keys, logits.logsumexp(-1).float(), SCALE, window=4, power=400.0)
    weights = logits.softmax(-1)
    for token in range(37 - 4):
        largest = weights[:, :, token + 4 :, token].amax(-1).log()
        torch.testing.assert_close(got[..., token].double(), largest, atol=0.02, rtol=0)


def test_sparse_normaliser_divides_by_the_retained_mass() -> None:
    queries, keys = _inputs(2, 2, 37)
    logits = _logits(queries, keys)
    rank = ranks(torch.rand(2, 2, 37))
    mask = keep_mask(rank, running_cutoff(rank, 2, 4, 6), 2, 4)
    sparse = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)
    dense = logits.softmax(-1)
    retained = (dense * mask).sum(-1, keepdim=True)  # rho of each query
    window = 4
    got = future_mass(queries, keys, sparse.float(), SCALE, window, block=10)
    for token in range(37 - window):
        expected = (dense / retained)[:, :, token + window :, token].mean(-1).log()
        torch.testing.assert_close(got[..., token].double(), expected, atol=1e-4, rtol=1e-4)


def test_half_precision_is_summed_in_fp32() -> None:
    queries, keys = (tensor.bfloat16() for tensor in _inputs(4, 2, 37))
    normaliser = _logits(queries, keys).logsumexp(-1).float()
    got = future_mass(queries, keys, normaliser, SCALE, 3)
    for row in range(2):
        torch.testing.assert_close(
            got[row].double(), naive.future_mass(queries[row], keys[row], SCALE, 3), atol=1e-3, rtol=1e-3
        )


def test_group_target_is_the_maximum_above_the_floor() -> None:
    log_mass = torch.tensor([[[-1.0], [-2.0], [-math.inf], [-math.inf]]])
    got = group_target(log_mass, 2)
    torch.testing.assert_close(got, torch.tensor([[[-1.0], [math.log(1e-9)]]]), atol=1e-5, rtol=1e-5)
