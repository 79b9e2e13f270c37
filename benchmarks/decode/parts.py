"""Single kernels of a layer's decode step beside their plain forms and the bytes they have to move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.decode.clock import replayed
from benchmarks.decode.correctness import PAPER
from benchmarks.training.shapes import configuration
from kvbench.core.policy import Split, State, StateRequest, Tokens
from kvbench.core.slots import Slots, victims
from kvbench.engine import attention
from kvbench.engine.layer import Layer
from kvbench.kernels import skinny, slot_attention
from kvbench.kernels.rotary import rotated
from kvbench.kernels.settle import settled
from kvbench.kernels.skinny import Blocks
from kvbench.kernels.slot_attention import attend
from kvbench.kernels.slots import enter, leaving
from kvbench.models.source import geometry_of
from kvbench_policies.kvpop import kernel
from kvbench_policies.kvpop.policy import Kvpop
from kvbench_policies.kvpop.state import DelayedState

Row = dict[str, Any]
Emit = Callable[[Row], None]
Told = Callable[[str, float, float | None, float], None]
Kind = tuple[int, tuple[int, ...], bool]
Stages = list[tuple[tuple[str, ...], list[tuple[Any, ...]]]]
T = TypeVar("T")

_BEYOND_CACHE = 2**28
"""Bytes that the calls of one graph read together, so that none finds its own in the device's cache."""

_UPDATES = ("output", "down")
"""Products that are added to the rows."""

ONE_ROW = [
    Blocks(n, k, warps, 1)
    for n, k, warps in (
        (4, 512, 4), (4, 1024, 4), (8, 256, 4), (8, 512, 4), (16, 256, 4), (4, 256, 4), (2, 1024, 4), (2, 512, 4),
        (1, 1024, 2), (1, 2048, 4), (8, 256, 8), (8, 512, 8), (16, 256, 8), (4, 256, 2),
    )
]  # fmt: skip
FEW_ROWS = {
    "qkv": [
        Blocks(64, 128, 4, 4), Blocks(32, 128, 4, 5), Blocks(32, 256, 4, 3), Blocks(64, 128, 4, 6), Blocks(64, 64, 4, 8),
        Blocks(32, 256, 4, 4), Blocks(32, 128, 2, 5),
    ],
    "gate and up": [
        Blocks(64, 64, 4, 4), Blocks(64, 128, 4, 3), Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 5),
        Blocks(64, 128, 8, 3), Blocks(32, 128, 4, 4),
    ],
    "head": [
        Blocks(128, 64, 4, 4), Blocks(64, 128, 4, 4), Blocks(64, 64, 4, 5), Blocks(128, 128, 8, 3), Blocks(256, 64, 8, 3),
    ],
    "update": [
        Blocks(64, 128, 4, 4, 4), Blocks(32, 128, 4, 4, 4), Blocks(64, 128, 4, 5, 8), Blocks(64, 64, 4, 6, 4),
        Blocks(128, 64, 4, 4, 8), Blocks(32, 256, 4, 3, 2), Blocks(64, 128, 4, 4, 2),
    ],
}  # fmt: skip
"""Candidates of the tune part, the likely ones first."""

_GIVEN, _MEMORY, _READOUT = (
    ("tokens", "outputs", "inputs", "given_warps"), ("values", "memory_warps"), ("hidden", "readout_warps"),
)  # fmt: skip
SCORER: dict[int, Stages] = {
    1: [
        (_MEMORY, [(0, 8), (16, 1), (32, 2)]),
        (_GIVEN, [(1, 8, 128, 4), (1, 16, 128, 2), (1, 16, 64, 4), (1, 32, 128, 8)]),
    ],
    16: [
        (_MEMORY, [(0, 16), (32, 1), (32, 2)]),
        (_READOUT, [(128, 8), (32, 4)]),
        (_GIVEN, [(16, 16, 64, 4), (16, 32, 32, 4), (16, 32, 64, 4)]),
    ],
    64: [
        (_MEMORY, [(32, 1), (32, 2), (64, 4)]),
        (_READOUT, [(128, 8), (32, 4)]),
        (_GIVEN, [(64, 16, 32, 4), (64, 32, 64, 4), (32, 16, 32, 4)]),
    ],
}
"""Candidates of the scorer by the most rows that they are for: one launch after another, each with the best of those before."""


def shapes_of(name: str) -> dict[str, Kind]:
    """K, rows of each matrix, and gate of the products of a layer, and of the output layer."""
    config = configuration(name)
    geometry = geometry_of(config)
    heads, kv = (n * geometry.head_dim for n in (geometry.query_heads, geometry.kv_heads))
    return {
        "qkv": (config.hidden_size, (heads, kv, kv), False),
        "output": (heads, (config.hidden_size,), False),
        "gate and up": (config.hidden_size, (config.intermediate_size,) * 2, True),
        "down": (config.intermediate_size, (config.hidden_size,), False),
        "head": (config.hidden_size, (config.vocab_size,), False),
    }


def tune(
    shape: str, slots: int, rows: list[int], device: torch.device, speed: float, quick: bool, only: str, emit: Emit
) -> None:
    """Times products and scorer with every kind of blocks; what runs after this in the same process uses the fastest."""
    for count in rows:
        for name, kind in shapes_of(shape).items():
            if only in f"product, {name}":
                _tune_one(name, kind, count, device, speed, quick, emit)
        if only in "mLSTM scorer":
            _tune_scorer(shape, slots, count, device, speed, emit)
    for module in (skinny, kernel):
        print(f"{module.__name__}: MEASURED =", dict(module.MEASURED), flush=True)


def _tune_one(name: str, kind: Kind, count: int, device: torch.device, speed: float, quick: bool, emit: Emit) -> None:
    size, outputs, gated = kind
    weights, x = _product(kind, count, device)
    found: list[tuple[float, Blocks]] = []
    for blocks in (ONE_ROW if count == 1 else FEW_ROWS["update" if name in _UPDATES else name])[: 5 if quick else None]:
        # Two tiles and two sums would not fit.
        if gated and blocks.outputs * blocks.inputs > (4096 if count == 1 else 8192):
            continue
        try:
            call = _call(name, kind, x, blocks)
            found.append((replayed(call, weights, device, replays=8), blocks))
        except Exception as error:  # noqa: BLE001 - too much shared memory, say; the others still count
            print(f"  {name} {blocks}: {type(error).__name__} {str(error)[:100]}", flush=True)
    found.sort()
    row: Row = {"part": "tune", "kernel": f"product, {name}", "rows": count, "us": found[0][0]}
    row["plain_us"] = replayed(partial(_library, x, gated), weights, device, replays=8)
    row["floor_us"] = 1e6 * sum(outputs) * size * 2 / speed
    emit({**row, "blocks": found[0][1], "next": found[1:4]})
    skinny.MEASURED[skinny.height(count), size, outputs[0] if gated else sum(outputs), gated] = found[0][1]


def kernels(shape: str, slots: int, rows: list[int], device: torch.device, speed: float, emit: Emit) -> None:
    """Times every kernel of a layer with KVpop at paper scale, and the plain operations that it stands for."""
    for count in rows:

        def told(name: str, fast: float, plain: float | None, moved: float, count: int = count) -> None:
            row = {"part": "kernels", "kernel": name, "rows": count, "us": fast, "plain_us": plain}
            emit({**row, "floor_us": 1e6 * moved / speed})

        _products(shape, count, device, told)
        _on_slots(shape, slots, count, device, told)
        _scorer(shape, slots, count, device, told)


def _products(shape: str, count: int, device: torch.device, told: Told) -> None:
    for name, kind in shapes_of(shape).items():
        size, outputs, gated = kind
        weights, x = _product(kind, count, device)
        plain = replayed(partial(_library, x, gated), weights, device)
        fast = replayed(_call(name, kind, x), weights, device)
        told(f"product, {name}", fast, plain, sum(outputs) * size * 2)
    if count == 1:
        return
    hidden = configuration(shape).hidden_size
    x, gain = (torch.randn(n, hidden, device=device).bfloat16() for n in (count, 1))
    for splits in (1, 4, 8):
        update = torch.randn(splits, count, hidden, device=device)
        fast = replayed(lambda one: settled(x, one, gain, 1e-6), [update], device)
        told(f"update of {splits} shares and norm", fast, None, update.nbytes + 3 * x.nbytes)


def _on_slots(shape: str, slots: int, count: int, device: torch.device, told: Told) -> None:
    geometry, (_, split) = geometry_of(configuration(shape)), _policy(shape, slots)
    heads, kv, dim = geometry.query_heads, geometry.kv_heads, geometry.head_dim
    entry, held = 2 * dim * 2, count * kv * split.slots
    filled = _copies(lambda: filled_slots(count, kv, dim, split, device), held * entry, device)
    at = torch.full((count,), split.slots + 5, device=device)
    query, key, value = (torch.randn(count, n, 1, dim, device=device).bfloat16() for n in (heads, kv, kv))
    qkv = torch.randn(count, (heads + 2 * kv) * dim, device=device).bfloat16()
    turn, gain = torch.rand(count, dim, device=device).bfloat16(), torch.ones(dim, device=device).bfloat16()
    ranked, ring = torch.rand(count, kv, device=device), torch.zeros(count, kv, 1, dtype=torch.int64, device=device)

    def turned(one: Slots) -> None:
        rotated(qkv, (heads, kv), (gain, gain), 1e-6, turn, turn, one, at, leaves=True)

    told(
        "rotation and leaving token", replayed(turned, filled, device, 4), None, 2 * qkv.nbytes + 2 * count * kv * entry
    )
    taken = replayed(lambda one: leaving(one, at), filled, device, 4)
    told("leaving token alone", taken, None, 2 * count * kv * entry)

    def plainly(one: Slots) -> None:
        place = victims(one.priority, one.positions)[..., None]
        Layer(split, one, State())._write(place, key, value, at[:, None], ring)

    written = replayed(lambda one: enter(one, key, value, at, ranked, frees=False), filled, device, 4)
    told("victim and write", written, replayed(plainly, filled, device), held * 4 + count * kv * entry)

    def attended(one: Slots, blocks: slot_attention.Blocks | None = None) -> None:
        attend(query, one.keys, one.values, at, 0.1, blocks=blocks)

    plain = replayed(lambda one: attention.over_slots(query, one.keys, one.values, None, 0.1), filled, device)
    told("attention", replayed(attended, filled, device), plain, held * entry)
    for block, warps, stages in ((64, 4, 2), (64, 4, 4), (64, 8, 4), (128, 8, 3)):
        for splits in (1, 2, 4, 8, 16, 32, 64):
            if 100 <= count * kv * splits <= 1100:
                tried = slot_attention.Blocks(splits, block, warps, stages)
                fast = replayed(partial(attended, blocks=tried), filled, device)
                told(f"attention, {splits} x {block} slots, {warps} warps, {stages} stages", fast, None, held * entry)
    if count * heads * split.slots * 16 > 2**33:
        return
    fast = replayed(lambda one: attend(query, one.keys, one.values, at, 0.1, weighing=True), filled, device)
    plain = replayed(lambda one: attention.with_weights(query, one.keys, one.values, None, 0.1), filled, device)
    told("attention with weights", fast, plain, count * (kv * entry + heads * 4) * split.slots)


def _scorer(shape: str, slots: int, count: int, device: torch.device, told: Told) -> None:
    (fast, step, moved), (plain, plainly, _) = (
        _states(shape, slots, count, device, kernels) for kernels in (True, False)
    )
    told("mLSTM scorer", replayed(step, fast, device), replayed(plainly, plain, device), moved)


def _tune_scorer(shape: str, slots: int, count: int, device: torch.device, speed: float, emit: Emit) -> None:
    states, step, moved = _states(shape, slots, count, device, kernels=True)
    (rows, _, wide, features), hidden = states[0].memory.cells.shape, states[0].scorer.mix.shape[-1]
    sizes = wide - 1, features, hidden
    key = kernel.height(rows), *sizes
    found: dict[kernel.Blocks, float] = {}
    kernel.MEASURED.pop(key, None)
    best = kernel.best_blocks(rows, *sizes)
    stages: Stages = [((), [()]), *SCORER[next(most for most in SCORER if key[0] <= most)]]
    for fields, candidates in stages:
        for blocks in [best._replace(**dict(zip(fields, values, strict=True))) for values in candidates]:
            kernel.MEASURED[key] = blocks
            try:
                found[blocks] = replayed(step, states, device, replays=8)
            except Exception as error:  # noqa: BLE001 - as for the products
                print(f"  mLSTM scorer {blocks}: {type(error).__name__} {str(error)[:100]}", flush=True)
        best = min(found, key=found.__getitem__, default=best)
    kernel.MEASURED[key] = best
    row: Row = {"part": "tune", "kernel": "mLSTM scorer", "rows": rows, "us": found[best], "plain_us": None}
    others = sorted((us, tuple(blocks)) for blocks, us in found.items())
    emit({**row, "floor_us": 1e6 * moved / speed, "blocks": tuple(best), "next": others[1:]})


def _states(
    shape: str, slots: int, count: int, device: torch.device, kernels: bool
) -> tuple[list[DelayedState], Callable[[DelayedState], Tensor], float]:
    """Scorer states, a step of one, and the bytes that it has to move."""
    geometry, (policy, split) = geometry_of(configuration(shape)), _policy(shape, slots)
    scorer = policy.scorer(geometry).to(device).requires_grad_(False)
    at = torch.full((count, 1), split.slots + 5, device=device)
    shape_of = (count, geometry.kv_heads, 1, geometry.head_dim)
    new, old = (
        Tokens(
            torch.randn(shape_of, device=device).bfloat16(), torch.randn(shape_of, device=device).bfloat16(), positions
        )
        for positions in (at, at - split.window)
    )
    seeds = torch.zeros(count, dtype=torch.int64, device=device)
    request = StateRequest(0, count, geometry, split, seeds, device, scorer, torch.bfloat16, kernels=kernels)
    first = policy.state(request)
    weights = sum(tensor.nbytes for tensor in (first.weight, first.bias, scorer.mix, scorer.final))
    moved = 2 * sum(tensor.nbytes for tensor in first.tensors())
    states = [first, *_copies(lambda: policy.state(request), moved // 2 + weights, device)]
    return states, lambda one: one.step(new, old), moved + weights


def filled_slots(rows: int, heads: int, dim: int, split: Split, device: torch.device) -> Slots:
    """Full slots whose positions count up, with random priorities."""
    slots = Slots.empty(rows, heads, split.slots, dim, split.sinks, split.window, torch.bfloat16, device)
    slots.keys.normal_()
    slots.values.normal_()
    fill_metadata(slots)
    return slots


def fill_metadata(slots: Slots) -> None:
    """Token p in slot p; sinks and the window protected."""
    capacity, device = slots.capacity, slots.keys.device
    token = torch.arange(capacity, device=device)
    slots.positions.copy_(token.to(torch.int32).expand_as(slots.positions))
    slots.priority.uniform_()
    slots.priority.masked_fill_((token < slots.sinks) | (token > capacity - 1 - slots.window), torch.inf)
    newest = token[-slots.window :].expand_as(slots.recent)
    slots.recent.scatter_(-1, newest % slots.window, newest)


def _policy(shape: str, slots: int) -> tuple[Kvpop, Split]:
    policy = PAPER if slots > 1000 else Kvpop()
    return policy, policy.split(slots, geometry_of(configuration(shape)))


def _product(kind: Kind, count: int, device: torch.device) -> tuple[list[list[Tensor]], Tensor]:
    """Matrices, and rows."""
    size, outputs, _ = kind
    x = torch.randn(count, size, device=device).bfloat16()
    return _copies(
        lambda: [torch.randn(n, size, device=device).bfloat16() for n in outputs], sum(outputs) * size * 2, device
    ), x


def _call(name: str, kind: Kind, x: Tensor, blocks: Blocks | None = None) -> Callable[[list[Tensor]], Tensor]:
    """The product as a step makes it, of matrices."""
    size, _, gated = kind
    if not skinny.few(len(x), x.dtype):
        return partial(_library, x, gated)
    if len(x) > 1:
        if name in _UPDATES:
            return lambda weights: skinny.shares(x, weights[0], blocks)
        return partial(skinny.product, x, gated=gated, blocks=blocks)
    if name in _UPDATES:
        return partial(skinny.product, x, blocks=blocks)
    gain = torch.ones(size, device=x.device, dtype=x.dtype)
    return partial(skinny.product, x, gain=gain, eps=1e-6, gated=gated, blocks=blocks)


def _library(x: Tensor, gated: bool, weights: list[Tensor]) -> Tensor:
    parts = [functional.linear(x, weight) for weight in weights]
    return functional.silu(parts[0]) * parts[1] if gated else parts[0]


def _copies(make: Callable[[], T], size: int, device: torch.device) -> list[T]:
    return [make() for _ in range(max(2, -(-_BEYOND_CACHE // size)) if device.type == "cuda" else 1)]
