"""Single kernels of a layer's decode step beside their plain forms and the bytes they have to move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.decode.clock import replayed
from benchmarks.training.shapes import configuration
from kvbench.core.policy import Split, State, StateRequest, Tokens
from kvbench.core.slots import Slots, victims
from kvbench.engine import attention
from kvbench.engine.layer import Layer
from kvbench.kernels import skinny
from kvbench.kernels.rotary import rotated
from kvbench.kernels.slot_attention import attend
from kvbench.kernels.slots import enter, leaving
from kvbench.models.source import geometry_of
from kvbench_policies.kvpop.policy import Kvpop

Row = dict[str, Any]
Emit = Callable[[Row], None]

PAPER = {"window": 256, "features": 128, "values": 128, "hidden": 128, "decay": "learned", "horizon": 16384}
"""Sizes of the recipe qwen3-4b."""

_BEYOND_CACHE = 2**28
"""Bytes that the calls of one graph read together, so that none finds its own in the device's cache."""

ONE_ROW = [
    (n, k, warps, 1)
    for n, k, warps in (
        (4, 512, 4), (4, 1024, 4), (8, 256, 4), (8, 512, 4), (16, 256, 4), (4, 256, 4), (2, 1024, 4), (2, 512, 4),
        (1, 1024, 2), (1, 2048, 4), (8, 256, 8), (8, 512, 8), (16, 256, 8), (4, 256, 2),
    )
]  # fmt: skip
FEW_ROWS = [
    (32, 128, 4, 4), (16, 128, 4, 4), (64, 128, 4, 3), (32, 128, 4, 5), (64, 64, 4, 5), (16, 256, 4, 4), (32, 256, 4, 3),
    (32, 64, 4, 6), (64, 128, 4, 4), (64, 128, 8, 4), (128, 64, 4, 4), (128, 128, 8, 3), (32, 128, 8, 4), (16, 256, 4, 3),
]  # fmt: skip
"""Candidates of the tune part, the likely ones first."""

def shapes_of(name: str) -> dict[str, tuple[int, tuple[int, ...], bool]]:
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


def tune(shape: str, rows: list[int], device: torch.device, speed: float, quick: bool, emit: Emit) -> None:
    """Times products with every kind of blocks; the fastest are used by what runs after this in the same process."""
    for count in rows:
        for name, (size, outputs, gated) in shapes_of(shape).items():
            weights = _copies(lambda: _matrices(size, outputs, device), sum(outputs) * size * 2, device)
            x, gain = torch.randn(count, size, device=device).bfloat16(), torch.ones(size, device=device).bfloat16()
            normed = name not in ("output", "down")
            found: list[tuple[float, skinny.Blocks]] = []
            candidates = ONE_ROW if count == 1 else FEW_ROWS
            for blocks in candidates[: 5 if quick else None]:
                if gated and blocks[0] * blocks[1] * (1 if count == 1 else 2) > 8192:
                    continue

                def call(one: list[Tensor], blocks: skinny.Blocks = blocks) -> Tensor:
                    return skinny.product(x, one, gain=gain if normed else None, eps=1e-6, gated=gated, blocks=blocks)

                try:
                    found.append((replayed([lambda one=one: call(one) for one in weights], device, 8), blocks))
                except Exception as error:  # noqa: BLE001 - too much shared memory, say; the others still count
                    print(f"  {name} {blocks}: {type(error).__name__} {str(error)[:100]}", flush=True)
            found.sort()
            library = replayed([lambda one=one: _library(x, one, gated) for one in weights], device, 8)
            bytes_read = sum(outputs) * size * 2
            emit(
                {
                    "part": "tune",
                    "kernel": f"product, {name}",
                    "rows": count,
                    "us": found[0][0],
                    "plain_us": library,
                    "floor_us": 1e6 * bytes_read / speed,
                    "blocks": found[0][1],
                    "next": found[1:4],
                }
            )
            key = (skinny._height(count), size, outputs[0] if gated else sum(outputs), gated)
            skinny.MEASURED[key] = found[0][1]
    print("MEASURED =", dict(skinny.MEASURED), flush=True)


def kernels(shape: str, slots: int, rows: list[int], device: torch.device, speed: float, emit: Emit) -> None:
    """Times every kernel of a layer with KVpop at paper scale, and the plain operations that it stands for."""
    geometry = geometry_of(configuration(shape))
    heads, kv, dim = geometry.query_heads, geometry.kv_heads, geometry.head_dim
    policy = Kvpop(**PAPER) if slots > 1000 else Kvpop()
    split = policy.split(slots, geometry)
    scorer = policy.scorer(geometry).to(device).requires_grad_(False)
    entry = 2 * dim * 2
    for count in rows:

        def emit_one(name: str, fast: float, plain: float | None, moved: float, count: int = count) -> None:
            row = {"part": "kernels", "kernel": name, "rows": count, "us": fast, "plain_us": plain}
            emit({**row, "floor_us": 1e6 * moved / speed})

        def drawn(number: int, count: int = count) -> Tensor:
            return torch.randn(count, number, 1, dim, device=device).bfloat16()

        for name, (size, outputs, gated) in shapes_of(shape).items():
            weights = _copies(lambda: _matrices(size, outputs, device), sum(outputs) * size * 2, device)
            x, gain = torch.randn(count, size, device=device).bfloat16(), torch.ones(size, device=device).bfloat16()
            given = {"gain": gain, "eps": 1e-6} if name not in ("output", "down") else {}
            fast = replayed([lambda one=one: skinny.product(x, one, gated=gated, **given) for one in weights], device)
            plain = replayed([lambda one=one: _library(x, one, gated) for one in weights], device)
            emit_one(f"product, {name}", fast, plain, sum(outputs) * size * 2)
            del weights

        filled = _copies(lambda: filled_slots(count, kv, dim, split, device), count * kv * split.slots * entry, device)
        at = torch.full((count,), split.slots + 5, device=device)
        query, key, value = drawn(heads), drawn(kv), drawn(kv)
        qkv = torch.randn(count, (heads + 2 * kv) * dim, device=device).bfloat16()
        turn = torch.rand(count, dim, device=device).bfloat16()
        gain = torch.ones(dim, device=device).bfloat16()
        turning = replayed(
            [lambda one=one: rotated(qkv, (heads, kv), (gain, gain), 1e-6, turn, turn, one, at, True) for one in filled] * 4,
            device,
        )
        emit_one("norm and rotation of heads, and leaving token", turning, None, 2 * qkv.nbytes + 2 * count * kv * entry)
        taken = replayed([lambda one=one: leaving(one, at) for one in filled] * 4, device)
        emit_one("leaving token", taken, None, 2 * count * kv * entry)
        ranked = torch.rand(count, kv, device=device)
        written = replayed([lambda one=one: enter(one, key, value, at, ranked, False) for one in filled] * 2, device)
        plain_layers = [Layer(split, one, State()) for one in filled]
        ring = torch.zeros(count, kv, 1, dtype=torch.int64, device=device)

        def plain_enter(layer: Layer) -> None:
            place = victims(layer.slots.priority, layer.slots.positions)[..., None]
            layer._write(place, key, value, at[:, None], ring)

        plain = replayed([lambda one=one: plain_enter(one) for one in plain_layers], device)
        emit_one("victim and write", written, plain, count * kv * (split.slots * 4 + entry))
        for label, splits in (("attention", 0), ("attention, half the splits", -1), ("attention, twice the splits", 1)):
            shares = _splits(count * kv, split.slots, splits)
            fast = replayed(
                [lambda one=one: attend(query, one.keys, one.values, at, 0.1, splits=shares) for one in filled], device
            )
            emit_one(f"{label} ({shares})", fast, None, count * kv * split.slots * entry)
        for block, warps, stages in ((64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 8, 3), (32, 4, 4), (64, 8, 3)):
            fast = replayed(
                [
                    lambda one=one: attend(
                        query, one.keys, one.values, at, 0.1, block=block, warps=warps, stages=stages
                    )
                    for one in filled
                ],
                device,
            )
            emit_one(f"attention, {block} slots, {warps} warps, {stages} stages", fast, None, count * kv * split.slots * entry)
        fast = replayed([lambda one=one: attend(query, one.keys, one.values, at, 0.1, weighing=True) for one in filled], device)
        plain = replayed(
            [lambda one=one: attention.with_weights(query, one.keys, one.values, None, 0.1) for one in filled], device
        )
        emit_one("attention with weights", fast, plain, count * (kv * entry + heads * 4) * split.slots)
        plain = replayed(
            [lambda one=one: attention.over_slots(query, one.keys, one.values, None, 0.1) for one in filled], device
        )
        emit_one("attention, plain", plain, plain, count * kv * split.slots * entry)
        del filled, plain_layers

        new, old = Tokens(key, value, at[:, None]), Tokens(drawn(kv), drawn(kv), at[:, None] - split.window)
        times = []
        for fast_one in (True, False):
            states = [
                policy.state(
                    StateRequest(
                        0, count, geometry, split, torch.zeros(count).long(), device, scorer, torch.bfloat16,
                        kernels=fast_one,
                    )
                )
                for _ in range(max(2, _BEYOND_CACHE // (count * kv * 33000 * 8 + 4 * 2**20)) if device.type == "cuda" else 1)
            ]  # fmt: skip
            times.append(replayed([lambda one=one: one.step(new, old) for one in states], device))
            state_bytes = sum(tensor.nbytes for tensor in states[0].tensors())
        weights_read = sum(parameter.nbytes for parameter in scorer.parameters())
        emit_one("mLSTM scorer", times[0], times[1], weights_read + 2 * state_bytes)


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


def _splits(pairs: int, slots: int, doubled: int) -> int:
    from kvbench.kernels.slot_attention import _splits as chosen

    return max(1, int(chosen(pairs, slots) * 2.0**doubled))


def _library(x: Tensor, weights: list[Tensor], gated: bool) -> Tensor:
    parts = [functional.linear(x, weight) for weight in weights]
    return functional.silu(parts[0]) * parts[1] if gated else parts[0]


def _matrices(size: int, outputs: tuple[int, ...], device: torch.device) -> list[Tensor]:
    return [torch.randn(count, size, device=device).bfloat16() for count in outputs]


def _copies(make: Callable[[], Any], size: int, device: torch.device) -> list[Any]:
    return [make() for _ in range(max(2, -(-_BEYOND_CACHE // size)) if device.type == "cuda" else 1)]
