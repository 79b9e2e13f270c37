"""TOVA written down a second time, with Python lists and nothing of kvbench's engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvbench.models.source import LoadedModel

Entry = tuple[int, Tensor, Tensor]  # position, key, value


@dataclass
class Oracle:
    """One sequence under TOVA: drop what the last query attended to least, then append, then attend.

    What is dropped for a chunk of tokens is chosen before the chunk. Ties go to the oldest.
    """

    budget: int
    per_head: bool
    entries: dict[tuple[int, int], list[Entry]] = field(default_factory=dict)
    weights: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    start: int = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [1, Hq, T, D], key and value [1, H, T, D] -> [1, T, Hq, D]."""
        heads, count, group = key.shape[1], key.shape[2], query.shape[1] // key.shape[1]
        out, seen = torch.empty(1, count, query.shape[1], query.shape[3]), {}
        for head in range(heads):
            held = self.entries.setdefault((layer, head), [])
            ranking = self.weights.get((layer, head), [])
            for _ in range(max(0, len(held) + count - self.budget)):
                worst = min(range(len(ranking)), key=lambda slot: (ranking[slot], held[slot][0]))
                del held[worst], ranking[worst]
            held += [(self.start + t, key[0, head, t], value[0, head, t]) for t in range(count)]
            for member in range(head * group, (head + 1) * group):
                for t in range(count):
                    logits = torch.stack([entry[1] @ query[0, member, t] * scale for entry in held])
                    later = torch.tensor([entry[0] > self.start + t for entry in held])
                    seen[member] = logits.masked_fill(later, -torch.inf).softmax(0)
                    out[0, t, member] = seen[member] @ torch.stack([entry[2] for entry in held])
        for head in range(heads):
            members = range(head * group, (head + 1) * group) if self.per_head else range(heads * group)
            self.weights[layer, head] = torch.stack([seen[member] for member in members]).mean(0).tolist()
        return out

    def kept(self) -> list[list[list[frozenset[int]]]]:
        """Positions by layer, row (one) and head."""
        layers = 1 + max(layer for layer, _ in self.entries)
        heads = 1 + max(head for _, head in self.entries)
        return [
            [[frozenset(e[0] for e in self.entries[layer, head]) for head in range(heads)]] for layer in range(layers)
        ]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, oracle: Oracle, **_: Any
) -> Any:
    return oracle.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register("tova_oracle", _attention)


@contextmanager
def _attached(loaded: LoadedModel) -> Iterator[None]:
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("tova_oracle")
    try:
        yield
    finally:
        loaded.model.set_attn_implementation(before)


@torch.no_grad()
def run(
    loaded: LoadedModel, budget: int, per_head: bool, ids: Tensor, edges: list[int]
) -> Iterator[tuple[Tensor, Any]]:
    """Feeds ids [1, S] in pieces that end at `edges`: (logits of the last token [V], kept) after each."""
    oracle = Oracle(budget, per_head)
    with _attached(loaded):
        for start, stop in zip([0, *edges], edges, strict=False):
            oracle.start = start
            positions = torch.arange(start, stop)[None]
            output = loaded.model(input_ids=ids[:, start:stop], position_ids=positions, use_cache=False, oracle=oracle)
            yield output.logits[0, -1], oracle.kept()
