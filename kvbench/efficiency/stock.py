"""Stock transformers: the model's own forward pass with its growing cache, one greedy token a row and step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kvbench.efficiency.clock import STEPS_BESIDE, Times, time_calls, time_steps
from kvbench.efficiency.measure import memory_figures, step_figures
from kvbench.efficiency.memory import clear, one_error, peak
from kvbench.efficiency.record import EfficiencyCell, Figures
from kvbench.efficiency.traffic import Held, Moved, weights_held, weights_read
from kvbench.engine.audit import bytes_of
from kvbench.models.source import LoadedModel, geometry_of

_FILLS = 4096
"""Tokens that are put into the cache at once."""


def cache_argument(model: Any) -> str:
    """How the forward pass calls its cache: transformers renamed it between two minor versions."""
    known = inspect.signature(model.forward).parameters
    return "past_key_values" if "past_key_values" in known else "cache"


def filled_cache(loaded: LoadedModel, batch: int, length: int) -> Any:
    """The growing cache of transformers as if `length` tokens had been read."""
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    sizes = geometry_of(loaded.model.config)
    for layer in range(loaded.model.config.num_hidden_layers):
        for start in range(0, length, _FILLS):
            shape = (batch, sizes.kv_heads, min(_FILLS, length - start), sizes.head_dim)
            keys, values = (torch.randn(shape, dtype=loaded.dtype, device=loaded.device) for _ in range(2))
            cache.update(keys, values, layer)
    return cache


class StockStep:
    """One token a row through the model's forward pass."""

    def __init__(self, loaded: LoadedModel, cache: Any, batch: int, length: int) -> None:
        self._model = loaded.model
        self._cache = {cache_argument(loaded.model): cache}
        self._ids = torch.zeros(batch, 1, dtype=torch.int64, device=loaded.device)
        self._positions = torch.full((batch, 1), length, device=loaded.device)

    def __call__(self) -> bool:
        """One step."""
        logits: Tensor = self._model(
            input_ids=self._ids, position_ids=self._positions, use_cache=True, logits_to_keep=1, **self._cache
        ).logits
        self._ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self._positions.add_(1)
        return True


def measure_stock(loaded: LoadedModel, cell: EfficiencyCell, batch: int, bandwidth: float) -> Figures:
    """Times the steps of `batch` rows up to the cell's length.

    Raises:
        torch.OutOfMemoryError: there is no room.
    """
    device = loaded.device
    with one_error(), torch.inference_mode():
        clear(device)
        start = cell.gen_length - cell.steps - STEPS_BESIDE
        cache = filled_cache(loaded, batch, start)
        times = time_steps(StockStep(loaded, cache, batch, start), cell.steps, device)
        top = peak(device)
        kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        kv, length = bytes_of(kept), max(tensor.shape[2] for tensor in kept)
        new = kv // length
        del cache, kept
        clear(device)
        reading = _time_prefill(loaded, cell, batch)
    return Figures(
        path="plain",
        batch=batch,
        capacity=length,
        entries=float(length),
        **step_figures(times, batch, Moved(weights_read(loaded.model, batch), kv + new), bandwidth),
        **memory_figures(Held(weights_held(loaded.model), kv), top),
        prefill_ms=reading.median,
        prefill="exact",
        prefill_peak=peak(device),
        curve=((cell.gen_length, times.median),),
    )


def _time_prefill(loaded: LoadedModel, cell: EfficiencyCell, batch: int) -> Times:
    from transformers import DynamicCache

    prompts = torch.zeros(batch, cell.prompt_length, dtype=torch.int64, device=loaded.device)
    name = cache_argument(loaded.model)

    def read() -> object:
        cache = {name: DynamicCache(config=loaded.model.config)}
        return loaded.model(input_ids=prompts, use_cache=True, logits_to_keep=1, **cache)

    return time_calls(read, 3, loaded.device)
