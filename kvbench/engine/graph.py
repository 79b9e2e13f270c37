"""The decode step of all rows: plain, or as CUDA graphs that are captured once for each extent and then replayed."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvbench.engine.audit import Auditor
from kvbench.engine.rows import Rows

_BUCKET = 256


class PlainStep:
    """Calls `rows.step(); auditor.count()`; without an auditor nothing is counted."""

    path: ClassVar[str] = "plain"

    def __init__(self, rows: Rows, auditor: Auditor | None = None) -> None:
        self._rows = rows
        self._auditor = auditor

    def __call__(self) -> bool:
        """One step; true, as always when nothing had to be prepared for it."""
        self._rows.step()
        if self._auditor is not None:
            self._auditor.count()
        return True


class GraphedStep:
    """Calls like `PlainStep`, captured.

    A graph's shapes are fixed, so the two numbers that a step knows about lengths are rounded: `longest` up to a multiple
    of 256, `shortest` down to "every slot is full" or "maybe not". The first step of each kind runs plainly, which also
    warms up what capture cannot.
    """

    path: ClassVar[str] = "cuda_graph"

    def __init__(self, rows: Rows, auditor: Auditor | None = None) -> None:
        self._rows = rows
        self._auditor = auditor
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._largest = max(layer.slots.capacity for layer in rows.layers)

    def __call__(self) -> bool:
        """One step; true if it was a replay alone, false if it ran plainly or was captured first."""
        shortest, longest = self._rows.extent()
        full = shortest >= self._largest
        key = (self._largest if full else 0, self._rounded(longest))
        if key not in self._graphs:
            self._graphs[key] = None
            self._run(key)
            return False
        graph = self._graphs[key]
        captured = graph is not None
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._run(key)
            self._graphs[key] = graph
        graph.replay()
        return captured

    def _run(self, key: tuple[int, int]) -> None:
        self._rows.step(extent=key)
        if self._auditor is not None:
            self._auditor.count()

    def _rounded(self, longest: int) -> int:
        """Up to the next multiple, but never across the capacity of a layer, where the way of placing changes."""
        rounded = -(-longest // _BUCKET) * _BUCKET
        for capacity in sorted({layer.slots.capacity for layer in self._rows.layers}):
            if longest <= capacity:
                return min(rounded, capacity)
        return self._largest + 1


def decode_step(rows: Rows, auditor: Auditor | None = None, graphs: bool = True) -> PlainStep | GraphedStep:
    """The fastest way there is to run these rows' steps; its `path` says which."""
    return (GraphedStep if graphs and rows.ids.is_cuda else PlainStep)(rows, auditor)
