"""A model, a policy and R rows: the tensors of one run, and the model calls that fill and advance them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Policy, Split, StateRequest
from kvbench.core.recency import RecencyState
from kvbench.core.slots import Slots
from kvbench.engine import attention
from kvbench.engine.layer import Layer, Step
from kvbench.engine.requests import Observer
from kvbench.models.source import LoadedModel, sliding_windows

if TYPE_CHECKING:
    from kvbench.engine.segments import Segments

_LARGEST_CHUNK = 64


@dataclass(frozen=True)
class Setting:
    """What every set of rows of one `generate` call shares.

    Attributes:
        loaded: the model.
        policy: hyper-parameters.
        split: of the budget.
        scorers: trained modules, one a layer.
        longest: tokens of the longest request, its cap included: the slots of a policy without a hard budget.
        reference_length: tokens that the dense cache is taken to hold.
        kernels: decode steps run compiled kernels.
        segments: the model's products by kernels; None for the model's own forward.
    """

    loaded: LoadedModel
    policy: Policy
    split: Split
    scorers: nn.ModuleList | None
    longest: int = 0
    reference_length: int = 0
    kernels: bool = False
    segments: Segments | None = None

    @property
    def capacity(self) -> int:
        """Slots that a managed layer has: the budget, or one for every token where no budget is promised."""
        return self.split.slots if self.policy.hard_budget else self.longest

    def layers(self, rows: int, seeds: Tensor) -> list[Layer]:
        """Fresh layers for `rows` sequences with these random streams [rows]; sliding layers keep their own window."""
        return [self.layer(index, rows, seeds) for index in range(len(sliding_windows(self.loaded.model.config)))]

    def layer(self, index: int, rows: int, seeds: Tensor) -> Layer:
        """One of `layers`, by its place in the model."""
        geometry, device, dtype = self.loaded.geometry, self.loaded.device, self.loaded.dtype
        windows = sliding_windows(self.loaded.model.config)
        window = windows[index]
        split = self.split if window is None else Split(slots=window, sinks=0, window=1)
        slots = Slots.empty(
            rows,
            geometry.kv_heads,
            self.capacity if window is None else window,
            geometry.head_dim,
            split.sinks,
            split.window,
            dtype,
            device,
        )
        if window is not None:
            return Layer(split, slots, RecencyState(), kernels=self.kernels)
        managed = windows[:index].count(None)
        scorer = self.scorers[managed] if self.scorers is not None else None
        request = StateRequest(
            managed, rows, geometry, split, seeds, device, scorer, dtype, self.reference_length, self.kernels
        )
        return Layer(split, slots, self.policy.state(request), not self.policy.hard_budget, self.kernels)

    def chunks(self, size: int) -> list[tuple[int, int]]:
        """(start, stop) of the pieces in which a prompt of `size` tokens enters a managed layer."""
        capacity = self.capacity
        if self.policy.static or size <= capacity:
            return [(0, size)]
        # Sliding-window layers evict by position, one token at a time.
        sliding = any(window is not None for window in sliding_windows(self.loaded.model.config))
        chunk = 1 if sliding else max(1, min(_LARGEST_CHUNK, capacity // 8, self.split.long + 1))
        return list(pairwise([0, *range(capacity, size, chunk), size]))


class _Decode:
    def __init__(self, layers: Sequence[Layer], step: Step, observer: Observer | None, index: int) -> None:
        self._layers, self._step, self._observer, self._index = layers, step, observer, index

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out = self._layers[layer].decode(query, key, value, scale, self._step)
        if self._observer is not None:
            self._observer(layer, self._index, self._layers[layer].slots.positions)
        return out


class _Prefill:
    def __init__(self, layers: Sequence[Layer], start: int, seen: Sequence[Tensor] | None = None) -> None:
        self._layers, self._start, self._seen = layers, start, seen

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        check_shapes(layer, self._layers[layer].slots, key, value)
        if self._start == 0:
            seen = None if self._seen is None else self._seen[layer]
            return self._layers[layer].prefill(query, key, value, scale, seen)
        return self._layers[layer].extend(query, key, value, scale, self._start)


def check_shapes(layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
    """Refuses keys and values that are not of the shape that the configuration promises.

    Raises:
        KvbenchError: layers differ in their number or size of heads.
    """
    for tensor, storage in ((key, slots.keys), (value, slots.values)):
        if (tensor.shape[1], tensor.shape[3]) != (storage.shape[1], storage.shape[3]):
            raise KvbenchError(
                f"Layer {layer} caches {tensor.shape[1]} heads of size {tensor.shape[3]} where the configuration says "
                f"{storage.shape[1]} of {storage.shape[3]}; kvbench needs the same shape in every layer."
            )


@contextmanager
def contact(loaded: LoadedModel) -> Iterator[None]:
    """Routes the model's attention through the engine, and restores what it had.

    Raises:
        KvbenchError: the model does not go through the attention interface, or not with plain attention alone.
    """
    model = loaded.model
    refuse_unsupported(model, loaded.name)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention.NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def refuse_unsupported(model: Any, name: str) -> None:
    """Refuses what the engine cannot run; asks nothing of the configuration that another kind of model lacks.

    Raises:
        KvbenchError: the model does not go through the attention interface, or not with plain attention alone.
    """
    config = model.config
    if not model._supports_attention_backend:
        raise KvbenchError(
            f"Model '{name}' ({type(model).__name__}) does not use transformers' attention interface; "
            "kvbench needs a decoder-only model that does."
        )
    kinds = getattr(config, "layer_types", None) or ()
    if strange := sorted({*kinds} - {"full_attention", "sliding_attention"}):
        raise KvbenchError(f"Model '{name}' has layers of the kind {strange[0]}, which kvbench does not support.")
    if None not in sliding_windows(config):
        raise KvbenchError(f"Model '{name}' has a sliding window in every layer; there is no cache to evict from.")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            raise KvbenchError(
                f"Model '{name}' has {kind} rotary embeddings, which turn a token by the longest sequence of its batch; "
                "with kvbench a row's answer depends on that row alone."
            )


def call(loaded: LoadedModel, ids: Tensor, positions: Tensor, attending: attention.Attending, last: int = 1) -> Tensor:
    """Logits [R, last, V] of the last positions for ids and positions [R, T]."""
    output = loaded.model(
        input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last, kvbench=attending
    )
    logits = output.logits
    assert isinstance(logits, Tensor)
    return logits[:, -last:]


def feed(
    loaded: LoadedModel,
    layers: Sequence[Layer],
    ids: Tensor,
    start: int,
    last: int = 1,
    seen: Sequence[Tensor] | None = None,
) -> Tensor:
    """Feeds ids [R, T] that begin at position `start` of every row; logits [R, last, V] of the last of them.

    `seen` [R, H, T], one a layer, is filled with what each query attends to; only from position 0.
    """
    positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(len(ids), -1)
    return call(loaded, ids, positions, _Prefill(layers, start, seen), last)


def prefill(setting: Setting, layers: Sequence[Layer], prompts: Tensor) -> Tensor:
    """Reads prompts [R, T] of equal length into fresh layers; logits [R, V] of the last token."""
    for start, stop in setting.chunks(prompts.shape[1]):
        logits = feed(setting.loaded, layers, prompts[:, start:stop], start)
    return logits[:, -1]


def decode(
    loaded: LoadedModel,
    layers: Sequence[Layer],
    ids: Tensor,
    step: Step,
    observer: Observer | None = None,
    index: int = 0,
) -> Tensor:
    """Feeds one token a row, ids [R]; logits [R, V]."""
    return call(loaded, ids[:, None], step.positions[:, None], _Decode(layers, step, observer, index))[:, -1]
