"""The floor under a decode step: which bytes it has to move, counted from the tensors of the run.

What is read once and what is written, for R rows of H KV heads, in each layer:

- the model's weights are read once for all rows; of an input embedding that is not also the output layer, R rows;
- keys and values of every retained entry are read, those of the new tokens written;
- priorities of every retained entry are read where a rank decides the victim, and two a head are written (the newcomer's and
  that of the token that leaves the window), with a place of the ring read and one written; a policy that observes
  attention writes all of them; `full` and policies without a hard budget rank nothing;
- positions of every retained entry are read where they decide what is protected, by policies that observe; one a head is
  written;
- the parameters of the scorers are read once, in their number type;
- the policy's state is read and written once, whole.

Activations, logits and counters of the harness are not in it: they are small, or need not leave the chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kvbench.core.policy import ObservedState, State, StaticState
from kvbench.engine.audit import bytes_of, live_bytes
from kvbench.engine.layer import Layer

_PRIORITY, _POSITION, _PLACE = 4, 4, 8
"""Bytes of one."""


@dataclass(frozen=True)
class Moved:
    """Bytes of one step of all rows."""

    weights: int
    kv: int
    metadata: int = 0
    scorer: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.kv + self.metadata + self.scorer + self.state


@dataclass(frozen=True)
class Held:
    """Bytes that are there while steps run."""

    weights: int
    kv: int
    scorer: int = 0
    metadata: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.kv + self.scorer + self.metadata + self.state


def moved(model: nn.Module, layers: Sequence[Layer], scorers: nn.Module | None) -> Moved:
    """What one step of the rows in `layers` has to move."""
    rows = len(layers[0].slots.keys)
    return Moved(
        weights=weights_read(model, rows),
        kv=sum(_entries_moved(layer) for layer in layers),
        metadata=sum(_metadata(layer) for layer in layers),
        scorer=scorer_bytes(scorers),
        state=2 * sum(bytes_of(layer.state.tensors()) for layer in layers),
    )


def held(model: nn.Module, layers: Sequence[Layer], scorers: nn.Module | None) -> Held:
    """What a run holds between steps."""
    kv, state, metadata = live_bytes(layers)
    return Held(weights_held(model), kv, scorer_bytes(scorers), metadata, state)


def entries(layers: Sequence[Layer]) -> float:
    """Retained entries of a layer, row and KV head, mean."""
    return sum(float((layer.slots.positions >= 0).sum(-1).double().mean()) for layer in layers) / len(layers)


def weights_read(model: Any, rows: int) -> int:
    """Bytes of the weights that a step of `rows` tokens reads."""
    total = bytes_of(model.parameters())
    table: Tensor = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    if output is not None and output.weight is table:
        return total
    return total - bytes_of([table]) + rows * table.shape[1] * table.element_size()


def weights_held(model: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return bytes_of(model.parameters()) + bytes_of(model.buffers())


def scorer_bytes(scorers: nn.Module | None) -> int:
    """Bytes of the parameters of all scorers."""
    return 0 if scorers is None else bytes_of(scorers.parameters())


def _entries_moved(layer: Layer) -> int:
    keys = layer.slots.keys
    return (_retained(layer) + _heads(layer)) * 2 * keys.shape[3] * keys.element_size()


def _metadata(layer: Layer) -> int:
    retained, heads, state = _retained(layer), _heads(layer), layer.state
    total = heads * _POSITION
    if _observes(state):
        total += retained * (_POSITION + 2 * _PRIORITY)
    elif isinstance(state, StaticState):
        total += heads * 2 * (_PRIORITY + _PLACE)
        total += 0 if layer.frees else retained * _PRIORITY
    return total


def _observes(state: State) -> bool:
    return isinstance(state, ObservedState)


def _retained(layer: Layer) -> int:
    return int((layer.slots.positions >= 0).sum())


def _heads(layer: Layer) -> int:
    rows, heads = layer.slots.keys.shape[:2]
    return rows * heads
