"""The largest batch that fits: guessed from bytes, confirmed by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kvbench.core.errors import KvbenchError

T = TypeVar("T")

_SMALLER = 0.95
"""After a batch that does not fit the next has so many times its rows: the answer is right to within 5 %."""

_MOST = 4096


def largest_batch(room: int, fixed: int, per_row: int, run: Callable[[int], T]) -> T:
    """What running the largest batch that fits returned.

    Args:
        room: bytes that there are.
        fixed: bytes of what all rows share.
        per_row: bytes that a row keeps; what a step needs besides is found out by running it.
        run: runs a batch; raises torch.OutOfMemoryError if it does not fit.

    Raises:
        torch.OutOfMemoryError: not even one row fits.
    """
    batch = min(_MOST, (room - fixed) // per_row)
    while batch >= 1:
        try:
            return run(batch)
        except torch.OutOfMemoryError:
            batch = min(batch - 1, int(batch * _SMALLER))
    raise torch.OutOfMemoryError("not even one row fits")


def room(device: torch.device, limit: int | None) -> int:
    """Bytes that a run may take: the limit, or all that the device has.

    Raises:
        KvbenchError: there is neither.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        there = free + torch.cuda.memory_reserved(device)
        return there if limit is None else min(limit, there)
    if limit is None:
        raise KvbenchError("The largest batch on a CPU needs --memory: nobody says how much there is to take.")
    return limit
