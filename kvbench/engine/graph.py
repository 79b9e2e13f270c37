"""The decode step of all rows: plain, or as CUDA graphs that are captured once for each extent and then replayed."""

from __future__ import annotations

import torch

from kvbench.engine.audit import Auditor
from kvbench.engine.rows import Rows

_BUCKET = 256


class PlainStep:
    """Calls `rows.step(); auditor.count()`; without an auditor nothing is counted."""

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
    of 256, `shortest` down to "every slot is full" or "maybe not". Kernels ask neither: one graph serves all lengths. The first
    step of each kind runs plainly, which also warms up what capture cannot.
    """

    def __init__(self, rows: Rows, auditor: Auditor | None = None) -> None:
        self._rows = rows
        self._auditor = auditor
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._largest = max(layer.slots.capacity for layer in rows.layers)

    def __call__(self) -> bool:
        """One step; true if it was a replay alone, false if it ran plainly or was captured first."""
        key = self._key()
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

    def _key(self) -> tuple[int, int]:
        shortest, longest = self._rows.extent()
        if self._rows.setting.kernels:
            return 0, self._largest + 1
        return self._largest if shortest >= self._largest else 0, self._rounded(longest)

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
