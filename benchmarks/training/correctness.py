"""The compiled kernels against the plain forms, on a GPU: small lengths, few compilations. A check that fails raises."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.training.clock import Clock
from benchmarks.training.shapes import random_model
from benchmarks.training.steps import Steps, untrained
from kvbench.core import future_mass
from kvbench.core.ranking import Kept
from kvbench.engine import layer
from kvbench.engine.layer import Step
from kvbench.engine.run import Setting, contact, decode, prefill
from kvbench.kernels import logsumexp
from kvbench.kernels.attention import attention_over, biased_attention, biases
from kvbench.kernels.kept import keep
from kvbench.kernels.visible import Visible

SCALE = 0.2
LOSS_TOLERANCE = 1e-2
"""Of losses on two devices, relative, in fp32; near-ties of scores may fall either way."""

# rows, KV heads, tokens, sinks, window, k, different priorities: all laid end to end to one compiled length, 512. The last
# queries of the first case read in order of rank.
CASES = [
    (1, 2, 500, 4, 48, 60, 10**6),
    (2, 2, 250, 3, 7, 30, 5),
    (3, 2, 150, 0, 1, 0, 40),
    (1, 2, 509, 4, 128, 129, 3),
    (1, 2, 390, 2, 390, 4, 40),
]


def _kept(case: tuple[int, ...]) -> Kept:
    rows, heads, size, sinks, window, k, values = case
    return Kept.of(torch.randint(values, (rows, heads, size), device="cuda").float(), sinks, window, k)


def _inputs(case: tuple[int, ...], group: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    rows, heads, size = case[:3]
    shapes = ((rows, heads * group, size, dim), (rows, heads, size, dim), (rows, heads, size, dim))
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_(True) for shape in shapes]


def _explicit(query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
    """Attention with something added to all logits [R, H, S, S], in float64."""
    group = query.shape[1] // key.shape[1]
    key, value, added = (tensor.double().repeat_interleave(group, 1) for tensor in (key, value, added))
    weights = (query.double() @ key.mT * SCALE + added).softmax(-1)
    return weights @ value


def _same(out: Tensor, wanted: Tensor, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Values, and gradients of a random weighted sum."""
    weight = torch.randn(out.shape, device="cuda")
    mine = [out, *torch.autograd.grad((out * weight).sum(), inputs)]
    theirs = [wanted, *torch.autograd.grad((wanted * weight).sum(), inputs)]
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(mine, theirs, strict=True):
        # Gradients that are 0 in exact arithmetic, of a softmax over one key, are compared on the scale of the others.
        atol = tolerance * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.double(), other.double(), atol=atol, rtol=0)


def attention_over_what_is_kept(dtype: torch.dtype, dim: int, group: int) -> None:
    for case in CASES:
        inputs, kept = _inputs(case, group, dim, dtype), _kept(case)
        out, lse = attention_over(inputs[0], inputs[1], inputs[2], kept, SCALE)
        assert lse is not None
        added = torch.zeros((), device="cuda").masked_fill(~kept.mask(), -torch.inf)
        _same(out, _explicit(inputs[0], inputs[1], inputs[2], added), inputs, dtype)
        plain = future_mass.normaliser(inputs[0].detach(), inputs[1].detach(), SCALE, kept)
        torch.testing.assert_close(lse, plain, atol=2e-3, rtol=1e-3)


def the_mask_to_the_last_key() -> None:
    """With values that name their token, equal keys and zero queries, the output says exactly which tokens were seen."""
    for case in CASES:
        rows, heads, size = case[:3]
        kept = _kept(case)
        zeros = torch.zeros(rows, heads * 4, size, 32, device="cuda")
        seen = kept.mask().double()
        for start in range(0, size, 32):
            value = torch.zeros(rows, heads, size, 32, device="cuda")
            width = min(32, size - start)
            value[:, :, start : start + width, :width] = torch.eye(width, device="cuda")
            out, _ = attention_over(zeros, zeros[:, :heads], value, kept, SCALE)
            wanted = (seen / seen.sum(-1, keepdim=True))[..., start : start + width].repeat_interleave(4, 1)
            assert torch.equal(out[..., :width] > 0, wanted > 0)
            torch.testing.assert_close(out[..., :width].double(), wanted, atol=1e-5, rtol=1e-4)


def keys_in_both_orders() -> None:
    """That the cases above visit keys in order of rank and in order of time beyond the window."""
    partial, full = Visible.of(_kept(CASES[0])).blocks()
    by_rank, by_time = (partial | full).chunk(2, -1)
    assert by_rank.any()
    assert by_time[:, -2, 0].all()


def a_bias_and_its_gradient() -> None:
    case = CASES[1]
    inputs = [*_inputs(case, 4, 32, torch.float32), torch.randn(2, 2, 250, device="cuda", requires_grad=True)]
    out = biased_attention(inputs[0], inputs[1], inputs[2], inputs[3], 7, SCALE)
    _same(out, _explicit(inputs[0], inputs[1], inputs[2], biases(inputs[3], 7)), inputs, torch.float32)


def both_passes_of_the_target(dtype: torch.dtype, dim: int, group: int) -> None:
    for size in (1, 100, 513):
        queries, keys = (torch.randn(2, heads, size, dim, device="cuda").to(dtype) for heads in (2 * group, 2))
        lengths = torch.tensor([size, max(1, size - 70)], device="cuda")
        dense = logsumexp.normaliser(queries, keys, SCALE)
        torch.testing.assert_close(dense, future_mass.normaliser(queries, keys, SCALE), atol=2e-3, rtol=1e-3)
        for window in (1, 48, 128, size):
            for lookahead, power in ((0, 1.0), (0, 8.0), (40, 1.0)):
                found = logsumexp.future_logsumexp(queries, keys, dense, SCALE, window, lengths, lookahead, power)
                wanted = future_mass.future_logsumexp(
                    queries, keys, dense, SCALE, window, lengths=lengths, lookahead=lookahead, power=power
                )
                torch.testing.assert_close(found, wanted, atol=5e-3, rtol=1e-3)


def cut_offs_as_on_a_cpu() -> None:
    larger = [(1, 8, 5000, 4, 256, 900, 2000), (2, 1, 40001, 4, 256, 9000, 10**6)]
    for rows, heads, size, sinks, window, k, values in (*CASES, *larger):
        priority = torch.randint(values, (rows, heads, size)).float()
        mine, theirs = keep(priority.cuda(), sinks, window, k), Kept.of(priority, sinks, window, k)
        assert torch.equal(mine.rank.cpu(), theirs.rank)
        assert torch.equal(mine.cutoff.cpu(), theirs.cutoff)


def prefill_keeps_what_streaming_keeps() -> None:
    policy, budget = untrained("random"), 40
    loaded = random_model("small", torch.device("cuda"), torch.float32)
    ids = torch.randint(loaded.model.config.vocab_size, (2, 150), device="cuda")
    held = []
    before = layer._FUSED_FROM
    for prompt in (1, 140):
        layer._FUSED_FROM = 1
        try:
            setting = Setting(loaded, policy, policy.checked_split(budget, loaded.geometry), None)
            layers = setting.layers(2, torch.arange(2, device="cuda"))
            with torch.inference_mode(), contact(loaded):
                logits = prefill(setting, layers, ids[:, :prompt])
                for place in range(prompt, 150):
                    at = torch.full((2,), place, device="cuda")
                    logits = decode(loaded, layers, ids[:, place], Step(at, place + 1, place + 1))
            held.append((logits, [one.slots.positions.sort(-1).values for one in layers]))
        finally:
            layer._FUSED_FROM = before
    (streamed, kept), (parallel, same) = held
    for one, other in zip(kept, same, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(parallel, streamed, atol=2e-3, rtol=2e-3)


def losses_as_on_a_cpu() -> None:
    """Five steps in fp32 of the same weights on the same rows: what is kept, and so every loss, follows from the scores."""
    losses = []
    for device in ("cuda", "cpu"):
        with tempfile.TemporaryDirectory() as folder:
            more = {"precision": "fp32", "teacher_weights": "fp32", "normaliser": "sparse"}
            steps = Steps("small", 256, 2, torch.device(device), Path(folder), **more)
            clock = Clock(torch.device(device))
            kl = [steps.run("kvpop", clock, number) for number in range(5)]
            boundary = [float(record["sums"]["boundary"]) for record in steps.loop._pending]
            losses.append(torch.tensor([kl, boundary]))
    print(f"  largest relative difference: {float(((losses[0] - losses[1]) / losses[1]).abs().max()):.2g}", flush=True)
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=LOSS_TOLERANCE)


CHECKS: dict[str, Callable[[], None]] = {
    "attention fp32, D 32, G 4": lambda: attention_over_what_is_kept(torch.float32, 32, 4),
    "attention bf16, D 128, G 4": lambda: attention_over_what_is_kept(torch.bfloat16, 128, 4),
    "attention bf16, D 64, G 1": lambda: attention_over_what_is_kept(torch.bfloat16, 64, 1),
    "keys in both orders": keys_in_both_orders,
    "mask, exactly": the_mask_to_the_last_key,
    "bias and its gradient": a_bias_and_its_gradient,
    "target fp32, D 32, G 4": lambda: both_passes_of_the_target(torch.float32, 32, 4),
    "target bf16, D 128, G 4": lambda: both_passes_of_the_target(torch.bfloat16, 128, 4),
    "target bf16, D 20, G 1": lambda: both_passes_of_the_target(torch.bfloat16, 20, 1),
    "cut-offs": cut_offs_as_on_a_cpu,
    "losses of five steps": losses_as_on_a_cpu,
    "prefill": prefill_keeps_what_streaming_keeps,
}
