"""Lengths of the heads of a policy without a hard budget: random gates mean nothing, so a stated histogram does."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

from kvbench.core.errors import KvbenchError
from kvbench.rows import RESULTS, read_results

SIGMA = 0.6
"""Of the logarithm of head lengths, where none were measured: the longest of 288 heads is about five times the median."""

SYNTHETIC = f"lognormal(sigma={SIGMA})"

_SEED = 0


def measured_heads(path: Path) -> tuple[float, ...]:
    """Head lengths in the order of their size, from a folder of `kvbench run` or a JSON file with a list a layer.

    Raises:
        KvbenchError: there are none.
    """
    if path.is_dir() and (path / RESULTS).is_file():
        rows = [row for row in read_results(path) if row.head_entries is not None]
        layers: object = rows[-1].head_entries if rows else None
    else:
        try:
            layers = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise KvbenchError(f"Head lengths cannot be read from {path}: {error}.") from error
    try:
        lengths = sorted(float(length) for layer in layers for length in layer)  # type: ignore[attr-defined]
    except TypeError as error:
        raise KvbenchError(
            f"{path} holds no head lengths; give a folder of 'kvbench run' with a row of a policy without a hard budget, "
            "or a JSON file with one list of numbers a layer."
        ) from error
    if not lengths or not all(0 < length < math.inf for length in lengths):
        raise KvbenchError(f"The head lengths in {path} are not all numbers above 0.")
    return tuple(lengths)


def head_lengths(
    layers: int, heads: int, mean: int, least: int, most: int, shape: Sequence[float] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Entries of each head [layers, heads] whose mean is `mean`, exactly but for heads that are clipped.

    Args:
        layers: of the model that a policy manages.
        heads: KV heads of each.
        mean: the budget that the policy is matched to.
        least: sinks and window, which no gate drops.
        most: tokens that there are.
        shape: measured lengths in any unit, in order; a log-normal distribution with `SIGMA` if left out.
    """
    count = layers * heads
    quantiles = [(index + 0.5) / count for index in range(count)]
    if shape is None:
        values = [math.exp(SIGMA * NormalDist().inv_cdf(q)) for q in quantiles]
    else:
        values = [shape[int(q * len(shape))] for q in quantiles]
    total = min(max(mean, least), most) * count
    lengths = _scaled(values, total, least, most)
    random.Random(_SEED).shuffle(lengths)
    return tuple(tuple(lengths[layer * heads : (layer + 1) * heads]) for layer in range(layers))


def _scaled(values: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Whole numbers in proportion to ascending values, between `least` and `most`, whose sum is `total`."""
    low, high = 0.0, most / min(values)
    for _ in range(100):
        scale = (low + high) / 2
        if sum(min(max(scale * value, least), most) for value in values) < total:
            low = scale
        else:
            high = scale
    lengths = [int(min(max(high * value, least), most)) for value in values]
    missing = total - sum(lengths)
    for place in reversed(range(len(lengths))):
        if missing <= 0:
            break
        if lengths[place] < most:
            lengths[place] += 1
            missing -= 1
    return lengths
