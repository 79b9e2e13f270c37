from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from kvbench.core.ranking import Kept
from kvbench.kernels import flex, visible
from kvbench.kernels.visible import Visible, padded
from tests.kernels.cases import CASES, LATE, kept_of

BLOCK = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "BLOCK", BLOCK)
    monkeypatch.setattr(flex, "BLOCK", BLOCK)


def _all(kept: Kept) -> list[Tensor]:
    """Of each KV head, what queries of all rows laid end to end see [H, N, N]."""
    rows, heads, size = kept.rank.shape
    wanted = torch.zeros(heads, padded(rows * size), padded(rows * size), dtype=torch.bool)
    for row in range(rows):
        place = slice(row * size, (row + 1) * size)
        wanted[:, place, place] = kept.mask()[row]
    for filled in range(rows * size, wanted.shape[1]):
        wanted[:, filled, filled] = True
    return list(wanted)


def _seen(found: Visible, head: int) -> Tensor:
    """The mask of a KV head, all pairs of queries and keys [N, E]."""
    size = len(found.near)
    key = torch.arange(size if found.far is None else 2 * size)
    zero, query = torch.zeros((), dtype=torch.int64), torch.arange(size)[:, None]
    return found.mask_mod()(zero, zero + head, query, key)


def _check(found: Visible, wanted: list[Tensor]) -> None:
    partial, full = found.blocks()
    assert not (partial & full).any()
    size = len(found.near)
    for head, tokens in enumerate(wanted):
        seen = _seen(found, head)
        # How often each query sees each token, by whichever key: once or not at all.
        token = torch.arange(size)
        token = token if found.far is None else torch.cat((found.far.order[head], token))
        times = torch.zeros(size, size, dtype=torch.int64).index_add(1, token, seen.long())
        assert torch.equal(times, tokens.long())
        tiles = seen.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
        at = head if len(partial) > 1 else 0
        # No block that is needed is missing, and nothing is taken for whole that is not.
        assert not (tiles.any(-1).any(-1) & ~(partial | full)[at]).any()
        assert not (full[at] & ~tiles.all(-1).all(-1)).any()


def _by_rank(found: Visible) -> Tensor:
    """Which blocks of queries read what is beyond their window in order of rank [H, n]."""
    assert found.far is not None
    return (found.far.last < 2**31 - 1)[:, ::BLOCK]


def _in_order_of_time(kept: Kept) -> Tensor:
    """How many blocks each block of queries needs [H, n] of one row that is whole blocks long, if no key moves."""
    _, heads, size = kept.rank.shape
    token = torch.arange(size)
    rank = kept.rank[0].masked_fill(token < kept.sinks, -2).view(heads, 1, -1, BLOCK).amin(-1)
    cutoff = kept.cutoff[0].view(heads, -1, 1, BLOCK).amax(-1)
    first = token[::BLOCK]
    recent = first + BLOCK - 1 > (first - kept.window)[:, None]
    return (((rank <= cutoff) | recent) & (first <= first[:, None])).sum(-1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_running_top_k_as_numbers(case: tuple[int, ...]) -> None:
    kept = kept_of(*case)
    _check(Visible.of(kept), _all(kept))


@pytest.mark.parametrize("case", CASES[2:5], ids=str)
def test_padding_sees_and_is_seen_by_itself_only(case: tuple[int, ...]) -> None:
    _check_padded(kept_of(*case), torch.randint(1, case[2] + 1, (case[0],)))


def _check_padded(kept: Kept, lengths: Tensor) -> None:
    rows, _, size = kept.rank.shape
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


@pytest.mark.parametrize("case", LATE, ids=str)
def test_late_queries_read_a_beginning_of_the_order_of_rank(case: tuple[int, ...]) -> None:
    kept = kept_of(*case)
    found = Visible.of(kept)
    assert _by_rank(found).any()
    assert not _by_rank(found).all()
    _check(found, _all(kept))
    lengths = torch.randint(case[2] // 2, case[2], (case[0],))
    _check_padded(kept, lengths)


def test_what_gates_leave_is_dense_in_order_of_rank() -> None:
    kept = Kept.all_but(torch.rand(2, 2, 140) < 0.8, 2, 8)
    found = Visible.of(kept)
    assert _by_rank(found).any()
    _check(found, _all(kept))


@pytest.mark.parametrize(("share", "wanted"), [(4, 0.597), (8, 0.385)])
def test_scattered_priorities_take_fewer_blocks(share: int, wanted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query at q needs min(q, k S / q) tokens; the sum over q is k / S (1 + log(S / k)) of the causal one."""
    monkeypatch.setattr(visible, "BLOCK", 32)
    kept = Kept.of(torch.randn(1, 2, 4096), 4, 32, 4096 // share)
    partial, full = Visible.of(kept).blocks()
    causal, whole = Visible.causal(1, 4096, torch.device("cpu")).blocks()
    assert int((partial | full).sum()) / 2 / int((causal | whole).sum()) == pytest.approx(wanted, abs=0.04)


@pytest.mark.parametrize("k", [0, 8, 64, 250, 600])
def test_no_block_of_queries_takes_more_than_in_order_of_time(k: int) -> None:
    size = 512
    token = torch.arange(size).float()
    priorities = [token, -token, 0 * token, torch.randn(size), token + 50 * torch.randn(size), (token // 40) % 3]
    kept = Kept.of(torch.stack(priorities)[None], 4, 24, k)
    partial, full = Visible.of(kept).blocks()
    before = _in_order_of_time(kept)
    taken = (partial | full).sum(-1)
    assert (taken <= before).all()
    late = _by_rank(Visible.of(kept))
    assert torch.equal(taken < before, late)
    # Where recency decides, few blocks are needed as it is.
    assert not late[0].any()


def test_blocks_far_from_the_cut_off_are_skipped_or_taken_whole() -> None:
    """Priorities that fall in steps of a block: what is kept are whole blocks."""
    size, k = 128, 32
    priority = -(torch.arange(size) // BLOCK).float()[None, None]
    partial, full = Visible.of(Kept.of(priority, 0, BLOCK, k)).blocks()
    last, keys = slice(-1, None), size // BLOCK
    assert (full[0, last].nonzero()[:, 1] - keys).tolist() == [0, 1, 2, 3]
    assert (partial[0, last].nonzero()[:, 1] - keys).tolist() == [14, 15]


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
