from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from kvbench.kernels import attention, flex, visible
from kvbench.kernels.attention import attention_over, biased_attention, biases
from kvbench.kernels.visible import Visible
from tests.kernels.cases import CASES, LATE, as_added, explicit, kept_of

SCALE = 0.4
BLOCK = 8


def _shape(case: tuple[int, ...]) -> tuple[int, int, int]:
    rows, heads, size, *_ = case
    return rows, heads, size


def _inputs(rows: int, heads: int, size: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(rows, heads * g, size, 16) * 2 for g in (group, 1, 1))
    return query.requires_grad_(True), key.requires_grad_(True), value.requires_grad_(True)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("block", [7, 512])
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_the_plain_form_is_a_softmax_over_what_is_kept(
    case: tuple[int, ...], block: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_QUERIES", block)
    kept = kept_of(*case)
    given = _inputs(*_shape(case), group)
    out, lse = attention_over(*given, kept, SCALE)
    assert lse is None
    wanted = explicit(*given, as_added(kept.mask()), SCALE)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)
    weight = torch.randn(out.shape)
    mine = torch.autograd.grad((out * weight).sum(), given)
    theirs = torch.autograd.grad((wanted * weight).sum(), given)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("block", [7, 512])
def test_the_plain_bias_and_its_gradient(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERIES", block)
    given = (*_inputs(2, 2, 30, 2), torch.randn(2, 2, 30, requires_grad=True))
    window = 6
    out = biased_attention(*given, window, SCALE)
    wanted = explicit(*given[:3], biases(given[3], window), SCALE)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)
    weight = torch.randn(out.shape)
    mine = torch.autograd.grad((out * weight).sum(), given)
    theirs = torch.autograd.grad((wanted * weight).sum(), given)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("case", [CASES[1], CASES[2], LATE[3]], ids=str)
def test_flex_attention_over_what_queries_see(
    case: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled, which has no backward pass on a CPU; tests/kernels/test_gpu.py has the compiled kernel."""
    monkeypatch.setattr(visible, "BLOCK", 8)
    monkeypatch.setattr(flex, "BLOCK", 8)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    kept = kept_of(*case)
    query, key, value = (tensor.detach() for tensor in _inputs(*_shape(case), group))
    out, lse = flex.attend(query, key, value, Visible.of(kept), SCALE, kernel=flex.uncompiled)
    torch.testing.assert_close(
        out.double(), explicit(query, key, value, as_added(kept.mask()), SCALE), atol=1e-4, rtol=1e-4
    )
    logits = query @ key.repeat_interleave(group, 1).mT * SCALE
    wanted = (logits + as_added(kept.mask()).repeat_interleave(group, 1)).logsumexp(-1)
    torch.testing.assert_close(lse, wanted, atol=1e-4, rtol=1e-4)


def _as_compiled(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, score_mod: object
) -> tuple[Tensor, Tensor]:
    """What the compiled kernel computes, which looks at listed blocks only and does not ask the mask in full ones."""
    assert score_mod is None
    count, blocks = mask.kv_indices.shape[2:]
    zero, head = torch.zeros((), dtype=torch.int64), torch.arange(query.shape[1])[:, None, None]
    seen = mask.mask_mod(zero, head, torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2]))

    def listed(numbers: Tensor | None, indices: Tensor | None) -> Tensor:
        assert numbers is not None
        assert indices is not None
        counted = torch.arange(blocks) < numbers[0, ..., None]
        chosen = torch.zeros(len(counted), count, blocks, dtype=torch.bool).scatter(-1, indices[0].long(), counted)
        return chosen.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)

    seen = (seen & listed(mask.kv_num_blocks, mask.kv_indices)) | listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = (query @ key.mT * scale).masked_fill(~seen, -torch.inf)
    return logits.softmax(-1) @ value, logits.logsumexp(-1).detach()


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("case", [*CASES, *LATE], ids=str)
def test_keys_in_two_orders_and_their_gradients(
    case: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (visible, flex):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    kept, given = kept_of(*case), _inputs(*_shape(case), group)
    out, lse = flex.attend(*given, Visible.of(kept), SCALE, kernel=_as_compiled)
    wanted, _ = attention_over(*given, kept, SCALE)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    logits = given[0] @ given[1].repeat_interleave(group, 1).mT * SCALE
    sums = (logits + as_added(kept.mask()).repeat_interleave(group, 1)).logsumexp(-1)
    torch.testing.assert_close(lse, sums.detach(), atol=1e-4, rtol=1e-4)
    weight = torch.randn(out.shape)
    mine = torch.autograd.grad((out * weight).sum(), given)
    theirs = torch.autograd.grad((wanted * weight).sum(), given)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_autocast_decides_the_number_type() -> None:
    kept = kept_of(*CASES[1])
    given = _inputs(*_shape(CASES[1]), 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_over(*given, kept, SCALE)[0].dtype == torch.bfloat16
    assert attention_over(*given, kept, SCALE)[0].dtype == torch.float32
