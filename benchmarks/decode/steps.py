"""Whole decode steps, captured: model, policy, sampling; beside the bytes that the policy has to move."""

from __future__ import annotations

import gc
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch

from benchmarks.decode.clock import events, replayed
from benchmarks.decode.correctness import PAPER, setting_of
from benchmarks.decode.parts import Emit, Row, fill_metadata
from benchmarks.training.shapes import random_model
from kvbench.core.errors import KvbenchError
from kvbench.core.policy import ObservedState, StaticState
from kvbench.engine.compare import compare
from kvbench.engine.graph import GraphedStep
from kvbench.engine.path import with_kernels
from kvbench.engine.requests import Request, Sampling
from kvbench.engine.rows import Rows
from kvbench.engine.run import Setting, contact

PATHS = ("kernels", "cache_kernels", "graph")


def measure(
    shape: str,
    policies: list[str],
    paths: list[str],
    slots: int,
    counts: list[int],
    device: torch.device,
    speed: float,
    profiled: bool,
    emit: Emit,
) -> None:
    """Emits a row for each policy, path and number of rows."""
    loaded = random_model(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    with torch.inference_mode(), contact(loaded):
        for count in counts:
            for name in policies:
                for path in paths:
                    setting = setting_of(PAPER if name == "kvpop" and slots > 1000 else name, loaded, slots)
                    if not setting.policy.hard_budget:
                        raise KvbenchError(f"Rows of {name} are never full; kvbench efficiency measures its steps.")
                    if path != "graph":
                        setting = with_kernels(setting)
                    if path == "cache_kernels":
                        setting = replace(setting, segments=None)
                    try:
                        right = not setting.kernels or _compared(setting, count)
                        row = _step(setting, count, speed, profiled)
                        emit({**row, "path": path, "policy": name, "shape": shape, "right": right})
                    except torch.OutOfMemoryError:
                        print(f"  {name}, {count} rows, {path}: out of memory", flush=True)
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()


def _compared(setting: Setting, count: int) -> bool:
    try:
        compare(setting, count)
    except KvbenchError as error:
        print(f"  WRONG: {error}", flush=True)
        return False
    return True


def _step(setting: Setting, count: int, speed: float, profiled: bool) -> Row:
    rows = filled_rows(setting, count)
    device = setting.loaded.device
    row: Row = {"part": "steps", "rows": count, "slots": setting.capacity}
    if device.type == "cuda":
        step = GraphedStep(rows)
        for _ in range(3):
            step()
        row["ms"] = events(step)
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    else:
        row["ms"] = replayed(lambda one: one.step(), [rows], device) / 1000
    row["floor_ms"] = 1000 * moved(rows, setting) / speed
    row["ratio"] = row["ms"] / row["floor_ms"]
    if profiled and device.type == "cuda":
        row["profile"] = _profile(step, row["ms"])
    return row


def filled_rows(setting: Setting, count: int) -> Rows:
    """Full rows that have seen as many tokens as there are slots, with 100000 to come."""
    rows = Rows(setting, count, 100, Sampling())
    for layer in rows.layers:
        layer.slots.keys.normal_()
        layer.slots.values.normal_()
        fill_metadata(layer.slots)
        for tensor in layer.state.tensors():
            if tensor.is_floating_point():
                tensor.uniform_()
    size = setting.capacity if setting.policy.evicts else setting.capacity - 200
    request = Request((0,) * size, 100000)
    logits = torch.zeros(count, setting.loaded.model.config.vocab_size, device=rows.ids.device)
    seeds = torch.arange(count, device=rows.ids.device)
    rows.seat([(row, row, request) for row in range(count)], None, logits, seeds)
    return rows


def moved(rows: Rows, setting: Setting) -> float:
    """Bytes of a step: weights, entries, the metadata that decides, scorer, state read and written."""
    model: Any = setting.loaded.model
    total = float(sum(parameter.nbytes for parameter in model.parameters()))
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:
        total -= embedding.nbytes
    if setting.scorers is not None:
        total += sum(parameter.nbytes for parameter in setting.scorers.parameters())
    for layer in rows.layers:
        total += layer.slots.keys.nbytes + layer.slots.values.nbytes
        observed = isinstance(layer.state, ObservedState)
        if observed or isinstance(layer.state, StaticState):
            total += layer.slots.priority.nbytes * (2 if observed else 1)
        if observed:
            total += layer.slots.positions.nbytes
        total += 2 * sum(tensor.nbytes for tensor in layer.state.tensors())
    return total


def _profile(step: GraphedStep, ms: float) -> list[tuple[str, float, float]]:
    """Kernels of a step by name: launches, and milliseconds together; the longest first."""
    from torch.profiler import ProfilerActivity, profile

    replays = 3
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(replays):
            step()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    launches: dict[str, float] = defaultdict(float)
    for event in seen.events() or ():
        if event.device_type.name == "CUDA":
            times[event.name[:60]] += event.self_device_time_total / 1000 / replays
            launches[event.name[:60]] += 1 / replays
    print(
        f"  {sum(launches.values()):.0f} launches, {sum(times.values()):.2f} of {ms:.2f} ms inside kernels", flush=True
    )
    ranked = [(name, launches[name], total) for name, total in sorted(times.items(), key=lambda item: -item[1])[:25]]
    for name, number, total in ranked:
        print(f"    {total:8.3f} ms {number:6.0f} x {1000 * total / number:8.2f} us  {name}", flush=True)
    return ranked
