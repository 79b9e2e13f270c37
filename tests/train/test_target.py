from __future__ import annotations

import pytest
import torch

from kvbench.core import naive
from kvbench.core.future_mass import group_target, normaliser
from kvbench.core.ranking import Kept
from kvbench.train.target import TargetKind, future_target

SCALE, WINDOW = 0.3, 5


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_the_target_of_padded_rows_is_that_of_single_rows(power: float) -> None:
    kind = TargetKind(power=power)
    queries, keys = 2 * torch.randn(3, 4, 50, 8), 2 * torch.randn(3, 2, 50, 8)
    lengths = torch.tensor([50, 31, 18])
    together = future_target(queries, keys, SCALE, WINDOW, lengths, kind)
    for row, length in enumerate(lengths.tolist()):
        alone = future_target(
            queries[row : row + 1, :, :length],
            keys[row : row + 1, :, :length],
            SCALE,
            WINDOW,
            torch.tensor([length]),
            kind,
        )
        torch.testing.assert_close(together[row, :, : length - WINDOW], alone[0, :, : length - WINDOW])
        slow = naive.future_mass(queries[row, :, :length], keys[row, :, :length], SCALE, WINDOW, power=power)
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
    priority = torch.randn(2, 2, 30)
    keep = torch.zeros(2, 2, 30, 30, dtype=torch.bool)
    for row in range(2):
        for head in range(2):
            for query, tokens in enumerate(naive.streamed_sets(priority[row, head].tolist(), 2, WINDOW, 3)):
                keep[row, head, query, sorted(tokens)] = True
    sparse = logits.masked_fill(~keep[:, :, None], -torch.inf).logsumexp(-1).view(2, 4, 30)
    kept = Kept.of(priority, 2, WINDOW, 3)
    torch.testing.assert_close(normaliser(queries, keys, SCALE, kept, block=block), sparse)


@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1, 7, 100])
@pytest.mark.parametrize("group", ["max", "mean"])
def test_variants_of_the_target(group: str, lookahead: int, count: bool) -> None:
    queries, keys = 2 * torch.randn(2, 4, 40, 8), 2 * torch.randn(2, 2, 40, 8)
    lengths = torch.tensor([40, 27])
    kind = TargetKind(group=group, lookahead=lookahead, count=count)
    found = future_target(queries, keys, SCALE, WINDOW, lengths, kind)
    for row, length in enumerate(lengths.tolist()):
        mass = naive.future_mass(queries[row, :, :length], keys[row, :, :length], SCALE, WINDOW, lookahead, count).exp()
        grouped = mass.view(2, 2, length)
        over = grouped.amax(1) if group == "max" else grouped.mean(1)
        wanted = (over + 1e-9).log().float()[:, : length - WINDOW]
        torch.testing.assert_close(found[row, :, : length - WINDOW], wanted, atol=1e-4, rtol=1e-4)


def test_the_sparse_target_weighs_queries_by_what_they_still_see() -> None:
    """phat = p / rho with rho the dense attention of a query on what it keeps (docs/kvpop.md 3)."""
    queries, keys = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    kept = Kept.of(torch.randn(1, 2, 30), 2, WINDOW, 3)
    causal = torch.ones(30, 30, dtype=torch.bool).tril()
    weights = (queries[0] @ keys[0].mT * SCALE).masked_fill(~causal, -torch.inf).softmax(-1)
    shares = weights / (weights * kept.mask()[0]).sum(-1, keepdim=True)
    wanted = torch.stack([shares[:, token + WINDOW :, token].mean(-1) for token in range(30 - WINDOW)], -1)
    found = future_target(queries, keys, SCALE, WINDOW, torch.tensor([30]), TargetKind("sparse"), kept)
    torch.testing.assert_close(found[0, :, : 30 - WINDOW], (wanted + 1e-9).log(), atol=1e-4, rtol=1e-4)
