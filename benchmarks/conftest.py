"""Times a piece of one layer's decode step, and puts the fewest bytes that it must move beside the time.

A case is a device, a type and sizes. On CUDA a piece is captured as a graph, as in a captured decode step, over as many
copies of its tensors as no cache of the device can hold; a round replays the graph once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.case import CPU, CUDA, Case, Make, Piece, Timed
from kvbench.efficiency import clock

bandwidth = cache(clock.bandwidth)

_UNCACHED = 2**28
"""Bytes that a round on CUDA goes through, at least, where `_MOST` calls are enough for that."""

_MOST = 16
"""Copies of a piece, at most: each has a whole layer's slots."""

_NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=[*CPU, *(pytest.param(case, marks=[pytest.mark.gpu, _NO_CUDA]) for case in CUDA)], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    made = request.param
    assert isinstance(made, Case)
    torch.manual_seed(0)
    return made


@pytest.fixture
def timed(benchmark: Any) -> Timed:
    def run(case: Case, make: Make, floor: int) -> None:
        copies = min(_MOST, -(-_UNCACHED // floor)) if case.device.type == "cuda" else 1
        pieces = [make() for _ in range(copies)]
        with torch.inference_mode():
            benchmark(_captured(pieces) if case.device.type == "cuda" else pieces[0])
        seconds = floor / bandwidth(case.device)
        benchmark.extra_info.update(calls_a_round=copies, floor_bytes=floor, floor_us=1e6 * seconds)
        if benchmark.stats is not None:
            benchmark.extra_info["times_the_floor"] = benchmark.stats.stats.median / copies / seconds

    return run


def _captured(pieces: Sequence[Piece]) -> Piece:
    """All pieces as one CUDA graph."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for piece in pieces:
            piece()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for piece in pieces:
            piece()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay
