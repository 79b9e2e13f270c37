"""Time of device work that is replayed from a CUDA graph, so that no launch from the host is in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_REPLAYS = 30


def replayed(
    call: Callable[[T], Any], items: Sequence[T], device: torch.device, turns: int = 1, replays: int = _REPLAYS
) -> float:
    """Median microseconds of one call; calls of all items, in so many turns, run one after another in one graph."""

    def run() -> None:
        for _ in range(turns):
            for item in items:
                call(item)

    run()
    count = turns * len(items)
    if device.type != "cuda":
        return statistics.median(_wall(run) for _ in range(3)) * 1e6 / count
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return events(graph.replay, replays) * 1000 / count


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
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)))


def _wall(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
