from __future__ import annotations

import pytest
import torch

from kvbench.core.errors import KvbenchError
from kvbench.efficiency.largest import largest_batch, room
from kvbench.efficiency.memory import one_error


def test_the_guess_is_from_bytes_and_is_confirmed() -> None:
    tried = []

    def run(batch: int) -> int:
        tried.append(batch)
        # Beside what rows keep, a step takes as much again.
        if 100 + 20 * batch > 1100:
            raise torch.OutOfMemoryError
        return batch

    found = largest_batch(1100, 100, 10, run)
    assert tried[0] == 100
    assert 47 <= found <= 50


def test_not_even_one_row() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        largest_batch(100, 100, 10, lambda batch: batch)


def test_a_cpu_needs_a_limit() -> None:
    assert room(torch.device("cpu"), 5) == 5
    with pytest.raises(KvbenchError, match="needs --memory"):
        room(torch.device("cpu"), None)


def test_running_out_of_memory_is_one_error() -> None:
    with pytest.raises(torch.OutOfMemoryError), one_error():
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    def fail_while_capturing() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(torch.OutOfMemoryError), one_error():
        fail_while_capturing()
    with pytest.raises(RuntimeError, match="else"), one_error():
        raise RuntimeError("something else")
