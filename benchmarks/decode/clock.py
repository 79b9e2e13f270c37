"""Time of device work that is replayed from a CUDA graph, so that no launch from the host is in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_REPLAYS = 30


def replayed(calls: Sequence[Callable[[], Any]], device: torch.device, replays: int = _REPLAYS) -> float:
    """Median microseconds of one of the calls, which run one after another in one graph."""
    for call in calls:
        call()
    if device.type != "cuda":
        return statistics.median(_wall(calls) for _ in range(3)) * 1e6 / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return events(graph.replay, replays) * 1000 / len(calls)


def events(run: Callable[[], Any], replays: int = _REPLAYS) -> float:
    """Median milliseconds of a call by CUDA events, each launched while the one before runs."""
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written bytes both counted."""
    size = 2**31 if device.type == "cuda" else 2**24
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (replayed([lambda: target.copy_(source)], device, 20) / 1e6)


def _wall(calls: Sequence[Callable[[], Any]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start
