"""The target's kernel with other blocks, for whoever brings it to another GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.training.clock import median_ms
from benchmarks.training.shapes import configuration
from kvbench.models.source import geometry_of

CANDIDATES = [
    (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4),
    (64, 128, 4, 3), (64, 128, 8, 3), (128, 32, 4, 4), (256, 64, 8, 3),
]  # fmt: skip
"""Rows, columns, warps and stages."""


def measure(
    shape: str, length: int, device: torch.device, repeats: int, emit: Callable[[dict[str, Any]], None]
) -> None:
    """Emits a row for each candidate that compiles: both passes of the target at one length, in bf16."""
    from kvbench.kernels.band import Blocks, band_logsumexp

    sizes = geometry_of(configuration(shape))
    queries, keys = (
        torch.randn(1, heads, length, sizes.head_dim, device=device, dtype=torch.bfloat16)
        for heads in (sizes.query_heads, sizes.kv_heads)
    )
    scale, whole, window = sizes.head_dim**-0.5, torch.tensor([length], device=device), 256
    dense = band_logsumexp(queries, keys, None, scale, -length, 0, whole)
    for candidate in CANDIDATES:
        blocks = Blocks(*candidate)
        passes = {
            "normaliser": partial(band_logsumexp, queries, keys, None, scale, -length, 0, whole, 1.0, blocks),
            "future": partial(band_logsumexp, keys, queries, dense, scale, window, length, whole, 1.0, blocks),
        }
        try:
            taken = {f"{name} ms": median_ms(call, device, repeats) for name, call in passes.items()}
        except Exception as error:  # noqa: BLE001 - too large for this GPU, in one of the ways that a compiler has to say so
            print(f"  {blocks}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        emit({"part": "tuning", "shape": shape, "length": length, **blocks._asdict(), **taken})
