"""Every decode kernel against its plain form, at odd sizes, on fresh random numbers. A check that fails raises.

On a GPU they run compiled, at small and at paper scale; without one, under TRITON_INTERPRET=1, at small scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.training.shapes import random_model
from kvbench.core.policy import (
    Geometry,
    LearnedPolicy,
    PointwiseState,
    Policy,
    Split,
    State,
    StateRequest,
    StaticState,
    Tokens,
)
from kvbench.core.slots import Slots
from kvbench.engine.compare import compare
from kvbench.engine.generate import Engine
from kvbench.engine.layer import Layer, Step
from kvbench.engine.path import with_kernels
from kvbench.engine.requests import Request
from kvbench.engine.run import Setting, contact
from kvbench.kernels.best import best_of
from kvbench.kernels.rotary import rotated
from kvbench.kernels.settle import settled
from kvbench.kernels.skinny import product, shares
from kvbench.kernels.slot_attention import Blocks, attend
from kvbench.kernels.slots import rank
from kvbench.models.source import LoadedModel
from kvbench_policies.dms.policy import Dms
from kvbench_policies.full import Full
from kvbench_policies.h2o import H2o
from kvbench_policies.kvpop.policy import Kvpop
from kvbench_policies.kvpop_mlp.policy import KvpopMlp
from kvbench_policies.streaming_llm import StreamingLlm
from kvbench_policies.tova import Tova
from kvbench_policies.tova_head import TovaHead

POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (Full(), StreamingLlm(), Tova(), TovaHead(), H2o(), Dms(), Kvpop(), KvpopMlp())
}

PAPER = Kvpop(window=256, features=128, values=128, hidden=128, decay="learned", horizon=16384)
"""As in the recipe qwen3-4b."""


def number_types(device: str) -> tuple[torch.dtype, torch.dtype]:
    """Triton's interpreter takes the bits of bf16 for whole numbers."""
    return torch.float32, torch.bfloat16 if device == "cuda" else torch.float16


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated inside holds NaN until somebody writes it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Equal but for the rounding of a number type, relative to the largest number."""
    tolerance = factor * {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    found, wanted = found.double(), wanted.double()
    scale = float(torch.where(wanted.isfinite(), wanted, 0).abs().max().clamp(min=1e-6))
    torch.testing.assert_close(found, wanted, atol=tolerance * scale, rtol=0)


def products(device: str, large: bool) -> None:
    for dtype in number_types(device):
        for rows in (1, 2, 17, 64, 65) if large else (1, 17):
            for size, outputs in ((200, (96, 32, 40)), (70, (33,))):
                for kind in ("plain", "norm", "residual", "gated") if rows == 1 else ("plain", "gated"):
                    one_product(device, dtype, rows, size, outputs, kind)
                if rows > 1:
                    update(device, dtype, rows, size, outputs[0])
    if large:
        for kind, size, outputs in (
            ("norm", 2560, (4096, 1024, 1024)),
            ("residual", 9728, (2560,)),
            ("gated", 2560, (9728,)),
            ("norm", 2560, (151936,)),
        ):
            one_product(device, torch.bfloat16, 1, size, outputs, kind)
        for rows in (16, 64):
            one_product(device, torch.bfloat16, rows, 2560, (4096, 1024, 1024), "plain")
            one_product(device, torch.bfloat16, rows, 2560, (9728,), "gated")
            for size in (4096, 9728):
                update(device, torch.bfloat16, rows, size, 2560)


def one_product(device: str, dtype: torch.dtype, rows: int, size: int, outputs: tuple[int, ...], kind: str) -> None:
    x = torch.randn(rows, size, device=device).to(dtype)
    weights = [torch.randn(count, size, device=device).to(dtype) for count in outputs]
    up, gain = torch.randn_like(weights[0]), None
    residual = torch.randn(rows, sum(outputs), device=device).to(dtype)
    given = x.double()
    if kind in ("norm", "gated") and rows == 1:
        gain = torch.randn(size, device=device).to(dtype)
        given = given * (given.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain.double()
    with poisoned():
        if kind == "gated":
            found = product(x, [weights[0], up], gain=gain, eps=1e-6, gated=True)
        else:
            found = product(x, weights, gain=gain, eps=1e-6, residual=residual if kind == "residual" else None)
    wanted = given @ torch.cat(weights).double().T
    if kind == "gated":
        wanted = nn.functional.silu(given @ weights[0].double().T) * (given @ up.double().T)
    near(found, wanted + (residual if kind == "residual" else 0), dtype, 2)


def update(device: str, dtype: torch.dtype, rows: int, size: int, outputs: int) -> None:
    """A product in shares, added to rows; both normed."""
    x, weight = torch.randn(rows, size, device=device).to(dtype), torch.randn(outputs, size, device=device).to(dtype)
    before, norm = (
        torch.randn(rows, outputs, device=device).to(dtype),
        nn.RMSNorm(outputs, 1e-6, device=device, dtype=torch.float64),
    )
    norm.weight.data.normal_()
    gain = norm.weight.data.to(dtype)
    norm.weight.data.copy_(gain)
    with poisoned():
        found, normed = settled(before, shares(x, weight), gain, 1e-6)
        same, alone = settled(before, None, gain, 1e-6)
    wanted = before.double() + x.double() @ weight.double().T
    near(found, wanted, dtype, 2)
    near(normed, norm(wanted), dtype, 2)
    assert same is before
    near(alone, norm(before.double()), dtype, 2)


def largest(device: str, large: bool) -> None:
    for rows, size in ((1, 64), (3, 4097), (2, 9001), *(((64, 151936),) if large else ())):
        for dtype in number_types(device):
            logits = torch.randn(rows, size, device=device).to(dtype)
            logits[-1, [5, size - 1]] = 9.0
            with poisoned():
                token, margin = best_of(logits)
            two = logits.float().topk(2).values
            assert torch.equal(margin, two[:, 0] - two[:, 1])
            assert torch.equal(logits.gather(1, token[:, None])[:, 0], logits.amax(-1))
            assert int(token[-1]) == 5


def rotation(device: str, large: bool) -> None:
    for dtype in number_types(device):
        for rows, heads, kv, dim in ((1, 8, 2, 32), (5, 3, 3, 20), *(((16, 32, 8, 128),) if large else ())):
            given = torch.randn(rows, (heads + 2 * kv) * dim, device=device).to(dtype)
            gains = tuple(torch.randn(dim, device=device).to(dtype) for _ in range(2))
            angles = torch.rand(rows, dim // 2, device=device) * 6
            cos, sin = (torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))
            slots = Slots.empty(rows, kv, 11, dim, 0, 3, dtype, torch.device(device))
            slots.keys.normal_()
            slots.values.normal_()
            slots.recent.random_(11)
            at = torch.randint(90, (rows,), device=device)
            for norms in (None, (gains[0], gains[1])):
                with poisoned():
                    query, key, value, old = rotated(
                        given, (heads, kv), norms, 1e-6, cos, sin, slots, at, leaves=norms is not None
                    )
                assert (old is not None) == (norms is not None)
                if old is not None:
                    place = slots.recent.gather(-1, (at % 3)[:, None, None].expand(-1, kv, 1))[..., 0]
                    rows_of, heads_of = torch.arange(rows, device=device)[:, None], torch.arange(kv, device=device)
                    assert torch.equal(old.keys[:, :, 0], slots.keys[rows_of, heads_of, place])
                    assert torch.equal(old.values[:, :, 0], slots.values[rows_of, heads_of, place])
                    assert torch.equal(old.positions, at[:, None] - 3)
                wide = given.double().view(rows, -1, dim)
                parts = wide[:, :heads], wide[:, heads : heads + kv], wide[:, heads + kv :]
                for found, part, gain in ((query, parts[0], gains[0]), (key, parts[1], gains[1])):
                    if norms is not None:
                        part = part * (part.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain.double()
                    first, second = part.chunk(2, -1)
                    turned = part * cos.double()[:, None] + torch.cat((-second, first), -1) * sin.double()[:, None]
                    near(found[:, :, 0], turned, dtype)
                assert torch.equal(value[:, :, 0].double(), parts[2])


def attention(device: str, large: bool) -> None:
    small = [(2, 2, 3, 16, 37, None), (3, 1, 1, 8, 130, Blocks(2, 64, 4, 2)), (1, 2, 4, 20, 257, Blocks(4, 64, 4, 2))]
    paper = [
        (rows, heads, group, dim, capacity, None)
        for rows, heads, group, dim, capacity in (
            (1, 8, 4, 128, 4031), (16, 8, 4, 128, 2049), (70, 8, 4, 128, 300), (2, 3, 3, 64, 9000), (64, 8, 4, 128, 1100),
            (1, 8, 4, 128, 40000), (1, 4, 2, 256, 3000),
        )
    ]  # fmt: skip
    for dtype in number_types(device):
        cases = [*small, *(paper if large and dtype != torch.float32 else ())]
        for rows, heads, group, dim, capacity, blocks in cases:
            query = torch.randn(rows, heads * group, 1, dim, device=device).to(dtype)
            keys, values = (torch.randn(rows, heads, capacity, dim, device=device).to(dtype) for _ in "kv")
            at = torch.randint(2 * capacity, (rows,), device=device)
            at[0] = 0
            slot = torch.arange(capacity, device=device)
            for own in (False, True):
                lengths = (
                    torch.randint(1, capacity + 1, (rows, heads), device=device, dtype=torch.int32) if own else None
                )
                last = (at.clamp(max=capacity - 1) + 1)[:, None] if lengths is None else lengths
                seen = (slot < last[..., None]).expand(rows, heads, -1)
                # What lies in empty slots must not matter.
                dirty = [torch.where(seen[..., None], tensor, 1e4) for tensor in (keys, values)]
                wide = [t.double().repeat_interleave(group, 1) for t in dirty]
                logits = (query.double() @ wide[0].mT * 0.2).masked_fill(
                    ~seen.repeat_interleave(group, 1)[:, :, None], -torch.inf
                )
                weights = logits.softmax(-1)
                for weighing in (False, True):
                    with poisoned():
                        given = (query, dirty[0], dirty[1], at, 0.2, lengths, weighing, blocks)
                        out, found = attend(*given)
                    near(out, weights @ wide[1], dtype)
                    assert (found is not None) == weighing
                    if found is not None:
                        near(found, weights, torch.float32, 50)
                        assert torch.equal(found > 0, weights.float() > 0) or dtype == torch.float32


class Steered(PointwiseState):
    """Priorities that the values spell out, with ties, infinities and NaN."""

    def priority(self, tokens: Tokens) -> Tensor:
        first = tokens.values[..., 0].float()
        odd = torch.where(first > 1.2, torch.inf, torch.where(first < -1.2, torch.nan, (first * 2).round()))
        return torch.where(first.abs() < 0.1, -torch.inf, odd)


def entering(device: str, large: bool) -> None:
    """Everything that a step writes, to the bit, while rows of different lengths fill up and overflow."""
    # rows, heads, slots, sinks, window, frees
    cases = [(3, 2, 11, 2, 3, False), (2, 1, 9, 0, 1, False), (2, 2, 70, 4, 6, True), (2, 1, 12, 4, 8, False)]
    if not large:
        cases = cases[::2]
    if large:
        cases += [(4, 8, 5000, 4, 256, False), (2, 2, 33000, 4, 16, False), (2, 2, 33000, 4, 16, True)]
    cases += [(2, 2, 5000, 4, 16, True)]
    for state in (Steered, State):
        for rows, heads, capacity, sinks, window, frees in cases:
            dim, steps = 8, 60 if large and capacity < 100 else 18
            pair = [
                Layer(
                    Split(capacity, sinks, window),
                    Slots.empty(rows, heads, capacity, dim, sinks, window, torch.float32, torch.device(device)),
                    state(),
                    frees,
                    kernels,
                )
                for kernels in (False, True)
            ]
            start = torch.zeros(rows, dtype=torch.int64, device=device)
            if capacity > 100:
                # Full, from a prompt, at positions in disorder.
                for layer in pair:
                    torch.manual_seed(1)
                    prompt = torch.randn(2, rows, heads, capacity, dim, device=device)
                    shuffled = torch.rand(rows, heads, capacity, device=device).argsort(-1)
                    layer._fill(
                        Tokens(prompt[0], prompt[1], torch.arange(capacity, device=device).expand(rows, -1)),
                        layer._protect(torch.randint(5, (rows, heads, capacity), device=device).float(), capacity),
                    )
                    layer.slots.positions.copy_(layer.slots.positions.gather(-1, shuffled))
                    layer.slots.priority.copy_(layer.slots.priority.gather(-1, shuffled))
                    newest = layer.slots.positions.argsort(-1)[..., -window:]
                    ring = layer.slots.positions.gather(-1, newest).long() % window
                    layer.slots.recent.scatter_(-1, ring, newest)
                    if frees:
                        _drop(layer.slots)
                start = start + capacity
            # The second row is behind by some tokens: it repeats its first.
            lag = torch.arange(rows, device=device) * 5
            for now in range(steps):
                at = start + (now - lag).clamp(min=0)
                query, key, value = (torch.randn(rows, heads, 1, dim, device=device) for _ in range(3))
                step = Step(at, int(at.min()) + 1, int(at.max()) + 1)
                if capacity < 100 and step.longest > capacity and frees:
                    break
                outs = [layer.decode(query, key, value, 1.0, step) for layer in pair]
                near(outs[1], outs[0], torch.float32)
                for one, other in zip(pair[1].slots.tensors(), pair[0].slots.tensors(), strict=True):
                    if not torch.equal(one, other):
                        raise AssertionError(f"step {now} of {rows, heads, capacity, sinks, window, frees}")


def ranking(device: str, large: bool) -> None:
    """Priorities of policies that observe, to the bit, in rows that are full and others."""
    for rows, heads, capacity in ((2, 3, 70), (1, 1, 1500), *(((16, 8, 4096),) if large else ())):
        slots = Slots.empty(rows, heads, capacity, 8, 2, 5, torch.float32, torch.device(device))
        at = capacity - 7 + torch.arange(rows, device=device) * 30
        kept = torch.rand(rows, heads, capacity, device=device).argsort(-1)
        slots.positions.copy_(
            torch.where(kept <= at[:, None, None], kept + (at[:, None, None] - capacity + 1).clamp(0), -3)
        )
        for extent in (capacity, capacity - 3):
            given = torch.randn(rows, heads, extent, device=device)
            given[..., ::7], given[..., 1::7], given[..., 2::7] = torch.inf, torch.nan, -torch.inf
            for priority in (given, given[:, :1].expand(-1, heads, -1), given.mT.contiguous().mT, given.double()):
                slots.priority.uniform_()
                plain = replace(slots, priority=slots.priority.clone())
                rank(slots, priority, at)
                plain.set_priority(priority)
                assert torch.equal(slots.priority, plain.priority)


def _drop(slots: Slots) -> None:
    """Drops, in each head, another share of what is not protected, none in the first; what stays is moved to the front."""
    rows, heads, capacity = slots.positions.shape
    device = slots.positions.device
    share = torch.linspace(0, 0.9, rows * heads, device=device).view(rows, heads, 1)
    gone = (torch.rand(slots.positions.shape, device=device) < share) & (slots.priority < torch.inf)
    order = gone.to(torch.int8).argsort(dim=-1, stable=True)
    slots.recent.copy_(order.argsort(-1).gather(-1, slots.recent))
    entry = order[..., None].expand_as(slots.keys)
    slots.keys.copy_(slots.keys.gather(2, entry))
    slots.values.copy_(slots.values.gather(2, entry))
    gone = gone.gather(-1, order)
    vacant = torch.arange(-capacity, 0, dtype=torch.int32, device=device)
    slots.positions.copy_(torch.where(gone, vacant, slots.positions.gather(-1, order)))
    slots.priority.copy_(slots.priority.gather(-1, order).masked_fill(gone, -torch.inf))


def scorer(device: str, large: bool) -> None:
    """State and priorities of the scorers that have kernels over many steps."""
    small = Geometry(1, 4, 2, 12)
    cases: list[tuple[LearnedPolicy, Geometry, int]] = [
        (Kvpop(window=3), small, 1),
        (
            Kvpop(window=3, features=6, values=5, hidden=11, feature_map="softmax", gate_cap=0.0, decay="learned"),
            small,
            3,
        ),
        (Kvpop(window=5, scoring="immediate", decay="fixed", head_norm=False, skip=False), small, 2),
        (Kvpop(window=2, value_projection=False, features=4), Geometry(1, 2, 1, 16), 17),
        (KvpopMlp(hidden=5, decay="learned"), small, 1),
        (KvpopMlp(hidden=40), small, 3),
        (Dms(hidden=150), small, 1),
        (Dms(hidden=64), Geometry(1, 2, 1, 16), 17),
    ]
    if large:
        cases += [
            (policy, Geometry(36, 32, 8, 128), rows)
            for policy in (PAPER, KvpopMlp(hidden=128, decay="learned"), Dms(hidden=128))
            for rows in (1, 16, 64)
        ]
    for policy, geometry, rows in cases:
        for dtype in number_types(device):
            module = policy.scorer(geometry)
            assert module is not None
            module.to(device).requires_grad_(False)
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
            split = policy.split(policy.smallest_budget(geometry) + 40, geometry)
            states = []
            for kernels in (False, True):
                state = policy.state(
                    StateRequest(
                        0, rows, geometry, split, torch.zeros(rows).long(), torch.device(device), module, dtype,
                        2 * split.slots, kernels,
                    )
                )  # fmt: skip
                assert isinstance(state, StaticState)
                states.append(state)
            shape = (rows, geometry.kv_heads, 1, geometry.head_dim)
            history: list[Tokens] = []
            for now in range(300 if large else 7):
                at = torch.full((rows, 1), now, device=device)
                key, value = (torch.randn(shape, device=device).to(dtype) for _ in "kv")
                history.append(Tokens(key, value, at))
                leaving = history[max(0, now - split.window)]
                with poisoned():
                    found = states[1].step(history[-1], leaving)
                wanted = states[0].step(history[-1], leaving)
                # Cells that a number type rounds differ by its last bit.
                near(found, wanted, dtype, 10 if dtype == torch.float32 else 2)
                for one, other in zip(states[1].tensors(), states[0].tensors(), strict=True):
                    near(one, other, dtype, 10 if dtype == torch.float32 else 2)


def steps(device: str, policy_name: str, shape: str, dtype: torch.dtype, rows: int, layers: int = 2) -> None:
    """Whole steps of a policy through a model, as `kvbench run` compares them before it uses kernels."""
    loaded = random_model(shape, torch.device(device), dtype, layers=layers)
    setting = setting_of(policy_name, loaded, 60)
    with torch.inference_mode(), contact(loaded):
        compare(with_kernels(setting), rows)


def setting_of(policy: Policy | str, loaded: LoadedModel, budget: int) -> Setting:
    """A run of a policy with random scorers."""
    if isinstance(policy, str):
        policy = POLICIES[policy]
    geometry, scorers = loaded.geometry, nn.ModuleList()
    for _ in range(geometry.layers if isinstance(policy, LearnedPolicy) else 0):
        assert isinstance(policy, LearnedPolicy)
        scorers.append(policy.scorer(geometry) or nn.Identity())
    scorers.to(loaded.device).requires_grad_(False)
    for parameter in scorers.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    split = policy.split(budget, geometry)
    return Setting(
        loaded, policy, split, scorers if len(scorers) else None, longest=budget, reference_length=2 * budget
    )


def generation(device: str, policy_name: str) -> None:
    """Completions of requests of many lengths, rows refilled, captured with kernels and plainly: the same tokens."""
    loaded = random_model("small", torch.device(device), torch.float32)
    setting = setting_of(policy_name, loaded, 40)
    vocabulary = loaded.model.config.vocab_size
    requests = [
        Request(tuple(torch.randint(vocabulary, (5 + 9 * index,)).tolist()), 30 + 7 * index, index)
        for index in range(9)
    ]
    budget = 40 if setting.policy.evicts else None
    made = []
    for path in ("plain", "graph", "kernels"):
        engine = Engine(loaded, setting.policy, budget, setting.scorers, rows=3, path=path)
        made.append(engine.generate(requests))
    for other in made[1:]:
        differ = sum(a.tokens != b.tokens for a, b in zip(made[0].completions, other.completions, strict=True))
        ties = sum(completion.near_ties for completion in made[0].completions)
        assert differ <= ties, f"{other.path}: {differ} of {len(requests)} completions differ, {ties} near-ties"
        assert other.audit.violations == made[0].audit.violations
        assert other.audit.peak == made[0].audit.peak
    assert made[2].path == "cuda_graph+kernels"


def checks(device: str) -> dict[str, Callable[[], None]]:
    """All of them by name."""
    large = device == "cuda"
    found: dict[str, Callable[[], None]] = {
        "products": lambda: products(device, large),
        "largest logit": lambda: largest(device, large),
        "rotation": lambda: rotation(device, large),
        "attention": lambda: attention(device, large),
        "entering": lambda: entering(device, large),
        "ranking": lambda: ranking(device, large),
        "scorers": lambda: scorer(device, large),
    }
    if not large:
        return found
    for name in ("kvpop", "kvpop_mlp", "streaming_llm", "tova", "h2o", "dms", "full"):
        found[f"steps of {name}"] = lambda name=name: steps(device, name, "small", torch.float32, 3)  # type: ignore[misc]
        found[f"generation, {name}"] = lambda name=name: generation(device, name)  # type: ignore[misc]
    # More than our products are made for.
    for dtype, rows in ((torch.float32, 17), (torch.bfloat16, 65)):
        found[f"steps of kvpop, {rows} rows"] = lambda dtype=dtype, rows=rows: steps(  # type: ignore[misc]
            device, "kvpop", "small", dtype, rows
        )
    # The steps part compares before it measures, at the sizes of the recipe.
    for rows in (1, 16):
        found[f"steps of kvpop, qwen3-4b, {rows} rows"] = lambda rows=rows: steps(  # type: ignore[misc]
            device, "kvpop", "qwen3-4b", torch.bfloat16, rows
        )
    return found
