"""Rows as if they had read so many tokens: random keys and values at valid positions, so that long lengths cost no time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine.layer import Layer
from kvbench.engine.requests import Request
from kvbench.engine.rows import Rows


def fill(rows: Rows, length: int, further: int, heads: Sequence[Sequence[int]] | None = None) -> None:
    """Puts every row at position `length`, with `further` tokens to come.

    Sinks and the window are there, and between them tokens at even distances: as many as there are slots.

    Args:
        rows: of a run; whatever they held is gone.
        length: tokens that each row has fed.
        further: tokens that it may feed yet.
        heads: entries of each KV head of each layer that a policy manages, for policies without a hard budget.
    """
    managed = iter(heads or ())
    for layer in rows.layers:
        _fill_layer(layer, length, next(managed) if layer.frees else None)
    count = len(rows.ids)
    # The token that `seat` draws is one of the request's own.
    request = Request((0,) * length, further + 1)
    # Whatever the logits say: the first token of the vocabulary is fed next.
    logits = torch.zeros(count, rows.setting.loaded.model.config.vocab_size, device=rows.ids.device)
    seeds = torch.arange(count, device=rows.ids.device)
    rows.seat([(row, row, request) for row in range(count)], None, logits, seeds)


def _fill_layer(layer: Layer, length: int, heads: Sequence[int] | None) -> None:
    slots = layer.slots
    device, capacity = slots.keys.device, slots.capacity
    slots.keys.normal_()
    slots.values.normal_()
    slots.positions.copy_(torch.arange(-capacity, 0, device=device).expand_as(slots.positions))
    slots.priority.fill_(-torch.inf)
    for head in range(slots.keys.shape[1]):
        held = _held(length, min(length, capacity) if heads is None else heads[head], slots.sinks, slots.window)
        held = held.to(device)
        # As long as there is a slot for every token, each has its own; those that are emptied are filled again.
        place = held if length <= capacity and not layer.frees else torch.arange(len(held), device=device)
        priority = torch.rand(len(held), device=device)
        priority[(held < slots.sinks) | (held > length - 1 - slots.window)] = torch.inf
        slots.positions[:, head, place] = held.to(torch.int32)
        slots.priority[:, head, place] = priority
        recent = min(length, slots.window)
        slots.recent[:, head, held[-recent:] % slots.window] = place[-recent:]
    for tensor in layer.state.tensors():
        if tensor.is_floating_point():
            tensor.uniform_()


def _held(length: int, count: int, sinks: int, window: int) -> Tensor:
    """Positions of `count` of the first `length` tokens, ascending [count]."""
    if count >= length:
        return torch.arange(length)
    between, long = length - window - sinks, count - window - sinks
    middle = sinks + torch.arange(long) * between // max(1, long)
    return torch.cat([torch.arange(sinks), middle, torch.arange(length - window, length)])
