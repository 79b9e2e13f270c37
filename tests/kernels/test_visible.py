from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from kvbench.core.ranking import Kept
from kvbench.kernels import flex, visible
from kvbench.kernels.visible import Visible, padded
from tests.kernels.cases import CASES, kept_of

BLOCK = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "BLOCK", BLOCK)
    monkeypatch.setattr(flex, "BLOCK", BLOCK)


def _all(kept: Kept) -> list[torch.Tensor]:
    """Of each KV head, what queries of all rows laid end to end see [H, N, N]."""
    rows, heads, size = kept.rank.shape
    wanted = torch.zeros(heads, padded(rows * size), padded(rows * size), dtype=torch.bool)
    for row in range(rows):
        place = slice(row * size, (row + 1) * size)
        wanted[:, place, place] = kept.mask()[row]
    for filled in range(rows * size, wanted.shape[1]):
        wanted[:, filled, filled] = True
    return list(wanted)


def _check(found: Visible, wanted: list[torch.Tensor]) -> None:
    partial, full = found.blocks()
    assert not (partial & full).any()
    for head, seen in enumerate(wanted):
        assert torch.equal(found.mask(head), seen)
        tiles = seen.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
        at = head if len(partial) > 1 else 0
        # No block that is needed is missing, and nothing is taken for whole that is not.
        assert not (tiles.any(-1).any(-1) & ~(partial | full)[at]).any()
        assert not (full[at] & ~tiles.all(-1).all(-1)).any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_running_top_k_as_numbers(case: tuple[int, ...]) -> None:
    kept = kept_of(*case)
    _check(Visible.of(kept), _all(kept))


@pytest.mark.parametrize("case", CASES[2:5], ids=str)
def test_padding_sees_and_is_seen_by_itself_only(case: tuple[int, ...]) -> None:
    kept, (rows, _, size) = kept_of(*case), case[:3]
    lengths = torch.randint(1, size + 1, (rows,))
    real = torch.nn.functional.pad(
        (torch.arange(size) < lengths[:, None]).flatten(), (0, padded(rows * size) - rows * size)
    )
    both, itself = real[:, None] & real, torch.eye(len(real), dtype=torch.bool)
    _check(Visible.of(kept, lengths), [torch.where(both, seen, itself) for seen in _all(kept)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decisions_of_gates_as_numbers(case: tuple[int, ...]) -> None:
    rows, heads, size, sinks, window, _, _ = case
    kept = Kept.all_but(torch.rand(rows, heads, size) < 0.6, sinks, window)
    _check(Visible.of(kept), _all(kept))


def test_causal_rows_as_numbers() -> None:
    rows, size = 3, 21
    everything = Kept.of(torch.zeros(rows, 1, size), 0, size, 0)
    _check(Visible.causal(rows, size, torch.device("cpu")), _all(everything))


def test_blocks_far_from_the_cut_off_are_skipped_or_taken_whole() -> None:
    """Priorities that fall in steps of a block: what is kept are whole blocks."""
    size, k = 128, 32
    priority = -(torch.arange(size) // BLOCK).float()[None, None]
    partial, full = Visible.of(Kept.of(priority, 0, BLOCK, k)).blocks()
    last = slice(-1, None)
    assert full[0, last].nonzero()[:, 1].tolist() == [0, 1, 2, 3]
    assert partial[0, last].nonzero()[:, 1].tolist() == [14, 15]


def test_lengths_are_few_and_never_much_longer() -> None:
    lengths = [padded(size) for size in range(1, 4096)]
    assert all(size <= length <= max(BLOCK, 1.5 * size + BLOCK) for size, length in enumerate(lengths, 1))
    assert len({length for length in lengths if length > 512}) <= 9
    assert padded(16384) == 16384
    assert padded(32768) == 32768


@pytest.mark.parametrize("group", [1, 4])
def test_the_backward_lists_are_the_transposed_forward_lists(group: int) -> None:
    found = flex.block_mask(Visible.of(kept_of(2, 2, 64, 4, 16, 12, 5)), group)
    wanted = BlockMask.from_kv_blocks(
        found.kv_num_blocks,
        found.kv_indices,
        found.full_kv_num_blocks,
        found.full_kv_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=found.mask_mod,
    )
    assert found.kv_indices.shape[1] == 2 * group
    for name in ("q", "full_q"):
        numbers = getattr(wanted, f"{name}_num_blocks")
        assert torch.equal(getattr(found, f"{name}_num_blocks"), numbers)
        mine, theirs = getattr(found, f"{name}_indices"), getattr(wanted, f"{name}_indices")
        counted = torch.arange(mine.shape[-1]) < numbers[..., None]
        assert torch.equal(mine[counted], theirs[counted])
