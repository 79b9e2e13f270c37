"""The cache that transformers' `generate` carries from call to call under `kvbench.evict`.

It stores no keys and values in transformers' sense: `update` hands the new tokens on to the attention function, which calls
`attend` here, and that reads and writes slots. A batch may be padded: padding enters no slot, and each row has its own
length and positions, so that a row's slots do not depend on what shares its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Split
from kvbench.engine.audit import check_charged_state
from kvbench.engine.layer import Layer, Step
from kvbench.engine.run import Setting, check_shapes
from kvbench.models.source import sliding_windows

_ROOM = 1024
"""Slots that are added at once where every token has its own."""


class EvictedCache(Cache):
    """Slots of a batch of sequences, with the face of a transformers cache.

    Args:
        setting: model, policy and budget.
        seed: random stream of every row.
    """

    def __init__(self, setting: Setting, seed: int) -> None:
        super().__init__(layers=[])
        self._setting = setting
        self._seed = seed
        self._layers: list[Layer] = []
        self._windows = sliding_windows(setting.loaded.model.config)
        self._columns = 0
        self._lengths: list[int] = []
        self._reading = False
        self._groups: list[tuple[Tensor, Tensor]] = []
        self._steps: list[tuple[Step, Tensor | None]] = []
        self._awaited: set[int] = set()

    @property
    def tokens_seen(self) -> tuple[int, ...]:
        """Tokens that each row has read, padding not counted."""
        return tuple(self._lengths)

    @property
    def positions(self) -> tuple[Tensor, ...]:
        """Positions that each layer with a policy holds [R, H, B], int32, negative where a slot is empty."""
        return tuple(layer.slots.positions.clone() for layer in self._managed())

    @property
    def bytes_held(self) -> int:
        """Bytes of all slots with their metadata and of the policy's state, those of sliding-window layers included."""
        return sum(tensor.nbytes for layer in self._layers for tensor in layer.tensors())

    def feed(self, rows: int, columns: int, mask: Tensor | None) -> Tensor:
        """Announces the tokens of the next model call; returns their positions [R, T], 0 for padding.

        Args:
            rows: sequences in the batch.
            columns: tokens a row, padding included (T).
            mask: [R, any number of earlier columns + T], zero at padding; None without padding.

        Raises:
            KvbenchError: padding at the end, another number of rows, or an earlier call that failed half-way.
        """
        if self._awaited:
            raise KvbenchError("The last model call with this cache failed half-way; start the sequence again.")
        if self._lengths and rows != len(self._lengths):
            raise KvbenchError(
                f"This cache holds {len(self._lengths)} sequences; a call with {rows} cannot go on with it."
            )
        starts, device = self._lengths or [0] * rows, self._setting.loaded.device
        if mask is None:
            real, counts = torch.ones(rows, columns, dtype=torch.bool, device=device), [columns] * rows
        else:
            real = _real(mask, rows, columns).to(device)
            counts = _counts(real)
        self._reading = not self._lengths
        if self._reading:
            self._groups = list(_groups(real, counts, alone=self._setting.policy.needs_attention))
        else:
            self._steps = list(_steps(starts, [[True] * columns] * rows if mask is None else real.tolist(), device))
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self._awaited = set(range(len(self._windows)))
        before = torch.tensor(starts, device=device)[:, None]
        return (before + real.cumsum(-1) - 1).masked_fill(~real, 0)

    @torch.inference_mode(mode=False)  # a batch that starts under inference_mode may go on outside of it
    @torch.no_grad()
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The attention function's part: query [R, Hq, T, D], key and value [R, H, T, D] -> output [R, Hq, T, D]."""
        self._expect(layer)
        if not self._layers:
            self._make(key)
        self._awaited.remove(layer)
        mine = self._layers[layer]
        check_shapes(layer, mine.slots, key, value)
        if self._reading:
            return self._read(layer, query, key, value, scale)
        self._grow(layer)
        pieces = []
        for column, (step, idle) in enumerate(self._steps):
            q, k, v = (x[:, :, column : column + 1] for x in (query, key, value))
            pieces.append(_decode(mine, step, idle, q, k, v, scale))
        return torch.cat(pieces, 2)

    def _make(self, key: Tensor) -> None:
        """Layers of the type and on the device that keys turn out to have, which is not always the model's."""
        setting = replace(self._setting, loaded=replace(self._setting.loaded, device=key.device, dtype=key.dtype))
        if self._unbounded:
            longest = max(self._lengths) + _ROOM
            split = setting.split if setting.policy.evicts else Split(slots=longest, sinks=0, window=1)
            setting = replace(setting, split=split, longest=longest)
        self._setting = setting
        self._layers = setting.layers(len(self._lengths), self._seeds(len(self._lengths)))
        check_charged_state(self._managed(), setting.policy)

    def _read(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """A batch of prompts into fresh slots; zeros where there is padding."""
        if len(self._groups) == 1 and self._groups[0][1].numel() == len(query) * query.shape[2]:
            return self._enter(layer, self._layers[layer], query, key, value, scale)
        out = torch.zeros_like(query)
        for rows, columns in self._groups:
            fresh = self._setting.layer(layer, len(rows), self._seeds(len(rows)))
            q, k, v = (x[rows[:, None], :, columns].transpose(1, 2) for x in (query, key, value))
            out[rows[:, None], :, columns] = self._enter(layer, fresh, q, k, v, scale).transpose(1, 2)
            self._layers[layer].adopt(rows, fresh)
        return out

    def _enter(self, index: int, layer: Layer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Prompts of equal length, in the pieces in which the engine reads them."""
        if self._windows[index] is not None:
            return layer.prefill(query, key, value, scale)
        pieces = []
        for start, stop in self._setting.chunks(query.shape[2]):
            q, k, v = (x[:, :, start:stop] for x in (query, key, value))
            pieces.append(layer.extend(q, k, v, scale, start) if start else layer.prefill(q, k, v, scale))
        return torch.cat(pieces, 2)

    def _grow(self, layer: int) -> None:
        longest, slots = self._steps[-1][0].longest, self._layers[layer].slots
        if self._unbounded and self._windows[layer] is None and longest > slots.capacity:
            slots.grow(longest + _ROOM)

    @property
    def _unbounded(self) -> bool:
        return not (self._setting.policy.evicts and self._setting.policy.hard_budget)

    def _managed(self) -> list[Layer]:
        return [layer for layer, window in zip(self._layers, self._windows, strict=False) if window is None]

    def _seeds(self, rows: int) -> Tensor:
        return torch.full((rows,), self._seed, dtype=torch.int64, device=self._setting.loaded.device)

    def _expect(self, layer: int) -> None:
        if layer not in self._awaited:
            raise KvbenchError(
                "A cache of kvbench.evict works only inside the context that made it, with the model of that context."
            )

    # What transformers asks of a cache.

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new tokens as they came."""
        self._expect(layer_idx)
        if layer_idx == 0:
            self._columns += key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a row has been fed, padding included."""
        return self._columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        raise KvbenchError("Beam search is not supported under kvbench.evict: leave num_beams at 1.")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise KvbenchError(
            "Assisted generation is not supported under kvbench.evict, since evicted tokens do not come back: "
            "leave out assistant_model and prompt_lookup_num_tokens."
        )

    def reset(self) -> NoReturn:
        raise KvbenchError("A cache of kvbench.evict is not emptied: a model call without a cache starts a fresh one.")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        raise KvbenchError("Sequences of a kvbench.evict cache cannot be repeated: start with as many as are needed.")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        raise KvbenchError("Sequences of a kvbench.evict cache cannot be taken out: all of them go on together.")


def _real(mask: Tensor, rows: int, columns: int) -> Tensor:
    """Where the last `columns` columns of an attention mask are tokens [R, T], bool."""
    if mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] < columns:
        raise KvbenchError(
            f"An attention mask of shape {tuple(mask.shape)} came with {rows} sequences of {columns} tokens; "
            "kvbench.evict takes [sequences, tokens], zero at padding, or none."
        )
    return mask[:, mask.shape[1] - columns :] != 0


def _counts(real: Tensor) -> list[int]:
    """Tokens of each row."""
    numbers: list[list[int]] = torch.stack([real.sum(-1), real[:, -1]]).tolist()
    for row, (count, last) in enumerate(zip(*numbers, strict=True)):
        if count and not last:
            raise KvbenchError(f"Sequence {row} ends with padding; pad on the left (tokenizer.padding_side = 'left').")
    return numbers[0]


def _groups(real: Tensor, counts: Sequence[int], alone: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows [g], columns of their tokens [g, n]) of rows of equal length, or of each row by itself; only rows with tokens."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, count in enumerate(counts):
        groups.setdefault((count, row if alone else 0), []).append(row)
    for (count, _), rows in groups.items():
        if count:
            yield torch.tensor(rows, device=real.device), real[rows].nonzero()[:, 1].view(len(rows), count)


def _steps(
    starts: Sequence[int], real: Sequence[Sequence[bool]], device: torch.device
) -> Iterator[tuple[Step, Tensor | None]]:
    """For each column the decode step of all rows, and the rows for which it is padding (None without any)."""
    seen = list(starts)
    for column in zip(*real, strict=True):
        step = Step(torch.tensor(seen, device=device), min(seen) + 1, max(seen) + 1)
        idle = [row for row, token in enumerate(column) if not token]
        yield step, torch.tensor(idle, device=device) if idle else None
        seen = [length + token for length, token in zip(seen, column, strict=True)]


def _decode(
    layer: Layer, step: Step, idle: Tensor | None, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """One column; rows for which it is padding go through it too, and get back what they held."""
    held = [] if idle is None else [tensor[idle] for tensor in layer.tensors()]
    out = layer.decode(query, key, value, scale, step)
    if idle is not None:
        for tensor, before in zip(layer.tensors(), held, strict=True):
            tensor.index_copy_(0, idle, before)
    return out
