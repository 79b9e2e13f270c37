"""Times of parts of a step, on the device's own clock, and the memory of a block."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

GIB = 2**30


class Clock:
    """Seconds by part; parts may lie inside others. Nothing waits for the device until `seconds` is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._phase: list[str] = []

    @contextmanager
    def part(self, name: str, phase: bool = False) -> Iterator[None]:
        """Everything in the block counts for `name`; inside a phase, for `phase/name`."""
        full = "/".join((*self._phase, name))
        start = self._now()
        if phase:
            self._phase.append(name)
        try:
            yield
        finally:
            if phase:
                self._phase.pop()
            self._marks[full].append((start, self._now()))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls count for `name`."""

        @functools.wraps(function)
        def wrapped(*given: Any, **more: Any) -> Any:
            with self.part(name):
                return function(*given, **more)

        return wrapped

    def seconds(self) -> dict[str, float]:
        """Sums by part; forgets them."""
        if self._cuda:
            torch.cuda.synchronize()
            sums = {n: sum(a.elapsed_time(b) for a, b in m) / 1000 for n, m in self._marks.items()}
        else:
            sums = {name: sum(stop - start for start, stop in marks) for name, marks in self._marks.items()}
        self._marks.clear()
        return sums

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record()
        return event


def median_ms(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median of the milliseconds that a call takes on the device, after two that do not count."""
    clock = Clock(device)
    for _ in range(2):
        function()
    taken = []
    ahead = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device) if device.type == "cuda" else None
    for _ in range(repeats):
        if ahead is not None:
            # Some milliseconds of work, in which the host gets ahead: what is timed is the device, not the launching.
            for _ in range(4):
                ahead @ ahead
        with clock.part("call"):
            function()
        taken.append(1000 * clock.seconds()["call"])
    return statistics.median(taken)


def extra_memory(function: Callable[[], Any], device: torch.device) -> float:
    """GiB that a call takes at most beyond what is there; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / GIB


def peak_memory(device: torch.device) -> float:
    """GiB at the most since `reset`."""
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
