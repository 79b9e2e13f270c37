from __future__ import annotations

import pytest
import torch

from kvbench.core import naive
from kvbench.core.future_mass import group_target
from kvbench.train.target import future_target, normaliser

SCALE, WINDOW = 0.3, 5


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_the_target_of_padded_rows_is_that_of_single_rows(power: float) -> None:
    queries, keys = 2 * torch.randn(3, 4, 50, 8), 2 * torch.randn(3, 2, 50, 8)
    lengths = torch.tensor([50, 31, 18])
    together = future_target(queries, keys, SCALE, WINDOW, lengths, power=power)
    for row, length in enumerate(lengths.tolist()):
        alone = future_target(
            queries[row : row + 1, :, :length],
            keys[row : row + 1, :, :length],
            SCALE,
            WINDOW,
            torch.tensor([length]),
            power=power,
        )
        torch.testing.assert_close(together[row, :, : length - WINDOW], alone[0, :, : length - WINDOW])
        slow = naive.future_mass(queries[row, :, :length], keys[row, :, :length], SCALE, WINDOW, power)
        wanted = group_target(slow[None], 2)[0, :, : length - WINDOW].float()
        torch.testing.assert_close(alone[0, :, : length - WINDOW], wanted, atol=1e-4, rtol=1e-4)


def test_what_lies_in_the_padding_does_not_matter() -> None:
    queries, keys = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8)
    lengths = torch.tensor([40, 22])
    before = future_target(queries, keys, SCALE, WINDOW, lengths)
    queries[1, :, 22:] = 100.0
    keys[1, :, 22:] = -100.0
    after = future_target(queries, keys, SCALE, WINDOW, lengths)
    assert torch.equal(before[1, :, : 22 - WINDOW], after[1, :, : 22 - WINDOW])


@pytest.mark.parametrize("block", [7, 1024])
def test_normalisers(block: int) -> None:
    queries, keys = torch.randn(2, 4, 30, 8), torch.randn(2, 2, 30, 8)
    logits = torch.einsum("rhgqd,rhkd->rhgqk", queries.view(2, 2, 2, 30, 8), keys) * SCALE
    causal = torch.ones(30, 30, dtype=torch.bool).tril()
    dense = logits.masked_fill(~causal, -torch.inf).logsumexp(-1).view(2, 4, 30)
    torch.testing.assert_close(normaliser(queries, keys, SCALE, block=block), dense)
    keep = (torch.rand(2, 2, 30, 30) < 0.5) & causal | torch.eye(30, dtype=torch.bool)
    sparse = logits.masked_fill(~keep[:, :, None], -torch.inf).logsumexp(-1).view(2, 4, 30)
    torch.testing.assert_close(normaliser(queries, keys, SCALE, keep, block=block), sparse)
