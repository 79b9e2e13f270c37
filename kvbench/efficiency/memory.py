"""Memory of a device: its peak, what to do before a measurement, and one error for all the ways of running out of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SIGNS = ("out of memory", "can't allocate memory")


def clear(device: torch.device) -> None:
    """Give back what is unused and start the record of the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """Most bytes allocated since `clear`; None where nobody keeps count."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


@contextmanager
def one_error() -> Iterator[None]:
    """Raises torch.OutOfMemoryError also where it comes in disguise: from a CPU, a library, or the end of a failed capture."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:
            if any(sign in str(cause).lower() for sign in _SIGNS):
                raise torch.OutOfMemoryError(str(cause)) from error
            cause = cause.__cause__ or cause.__context__
        raise
