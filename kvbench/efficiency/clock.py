"""Time on a device: single steps, and how many bytes a second it moves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

_WARM = 3
"""Steps before the first that counts: one plain, one that captures, one replay."""

_SPARE = 4
"""Steps beyond those asked for, should an extent change on the way and a step have to be captured anew."""

_MOVED = {"cpu": 2**26, "cuda": 2**31}
"""Bytes that are read to measure the bandwidth."""

_MOVES = 10
_IN_A_ROW = 4

STEPS_BESIDE = _WARM + _SPARE
"""How many steps may run beside those that are timed."""


@dataclass(frozen=True)
class Times:
    """Median, quartiles, mean and number of single times in milliseconds."""

    median: float
    lo: float
    hi: float
    mean: float
    n: int

    @classmethod
    def of(cls, times: list[float]) -> Times:
        """From single times."""
        lo, middle, hi = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        return cls(middle, lo, hi, statistics.fmean(times), len(times))


def time_steps(step: Callable[[], bool], count: int, device: torch.device) -> Times:
    """Time of `count` steps in a row, the next launched while one runs.

    Args:
        step: runs one; false if it had to be prepared first and does not count.
        count: how many have to count.
        device: where they run.

    Raises:
        RuntimeError: too many steps had to be prepared.
    """
    for _ in range(_WARM):
        step()
    marks: list[tuple[_Mark, _Mark]] = []
    for _ in range(count + _SPARE):
        before = _Mark(device)
        ready = step()
        if ready:
            marks.append((before, _Mark(device)))
        if len(marks) == count:
            break
    else:
        raise RuntimeError(f"only {len(marks)} of {count} steps could be timed, the others had to be captured")
    synchronize(device)
    return Times.of([after.since(before) for before, after in marks])


def time_calls(call: Callable[[], object], count: int, device: torch.device) -> Times:
    """Time of `count` calls, each alone, after one that does not count."""
    call()
    times = []
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return Times.of(times)


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device moves: the most of a copy, a scaled copy (read and written bytes count) and a sum.

    A library's copy may be far from what the memory gives, and a decode step reads nearly all that it moves.
    """
    source = torch.ones(_MOVED[device.type] // 4, device=device)
    target, total = torch.empty_like(source), torch.empty((), device=device)
    size = source.nbytes
    moves: list[tuple[int, Callable[[], object]]] = [
        (2 * size, lambda: target.copy_(source)),
        (2 * size, lambda: torch.mul(source, 2, out=target)),
        (size, lambda: torch.sum(source, 0, out=total)),
    ]

    def repeated(call: Callable[[], object]) -> None:
        # Several in a row, so that launching and waiting hardly count.
        for _ in range(_IN_A_ROW):
            call()

    return max(
        moved * _IN_A_ROW / (time_calls(partial(repeated, call), _MOVES, device).median / 1000) for moved, call in moves
    )


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Mark:
    """A moment in the device's stream of work."""

    def __init__(self, device: torch.device) -> None:
        self._event = _event() if device.type == "cuda" else None
        self._time = 0.0
        if self._event is not None:
            self._event.record()
        else:
            self._time = time.perf_counter()

    def since(self, earlier: _Mark) -> float:
        """Milliseconds."""
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event))
        return 1000 * (self._time - earlier._time)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
