"""Counts what is stored, from the tensors: entries per layer, head, row and step, and live bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import Policy
from kvbench.engine.layer import Layer
from kvbench.engine.requests import Audit
from kvbench.engine.rows import Rows
from kvbench.engine.run import Setting
from kvbench.models.source import sliding_windows

T = TypeVar("T")


@dataclass(frozen=True)
class _Closed:
    """What was seen of one request: `removed` summed over its `steps`."""

    removed: float
    steps: int
    removed_at_end: float
    peak: int
    evictions: int


class Auditor:
    """Watches one `generate` call.

    `count` runs after every step and stays on the device: occupied slots are counted from the positions tensor of every
    managed layer, against the tokens that the row has seen.
    """

    def __init__(self, setting: Setting, rows: Rows) -> None:
        self._rows = rows
        self._reference = setting.reference_length
        self._budget = setting.split.slots
        windows = sliding_windows(setting.loaded.model.config)
        self._managed = [layer for layer, window in zip(rows.layers, windows, strict=True) if window is None]
        self._sliding = [layer for layer, window in zip(rows.layers, windows, strict=True) if window is not None]
        self._policy = setting.policy
        check_charged_state(self._managed, self._policy)
        count, device = len(rows.ids), rows.ids.device
        self._removed = torch.zeros(count, dtype=torch.float64, device=device)
        self._removed_now = torch.zeros(count, dtype=torch.float64, device=device)
        self._counted = torch.zeros(count, dtype=torch.int64, device=device)
        self._peak = torch.zeros(count, dtype=torch.int64, device=device)
        self._violations = torch.zeros((), dtype=torch.int64, device=device)
        self._evicted = torch.zeros(count, dtype=torch.int64, device=device)
        heads = (len(self._managed), setting.loaded.geometry.kv_heads)
        self._held = torch.zeros(heads, dtype=torch.int64, device=device)
        self._notes = torch.zeros((), dtype=torch.int64, device=device)
        self._closed: list[_Closed] = []
        self.longest_prompt = 0

    def seat(self, rows: Sequence[int], prompt: int) -> None:
        """New requests sit in these rows, their prompts read."""
        self.longest_prompt = max(self.longest_prompt, prompt)
        index = torch.tensor(rows, device=self._removed.device)
        for tensor in (self._removed, self._removed_now, self._counted, self._peak, self._evicted):
            tensor.index_fill_(0, index, 0)
        active = torch.zeros_like(self._rows.done).index_fill_(0, index, True)
        self._note(active)

    def count(self) -> None:
        """Notes the state after a decode step, for the rows that took part in it."""
        self._note(self._rows.fed)

    def _note(self, active: torch.Tensor) -> None:
        held = torch.stack([(layer.slots.positions >= 0).sum(-1) for layer in self._managed])
        seen = self._rows.lengths.clamp(min=1)
        retained = held.double().mean((0, 2))
        self._removed_now.copy_(torch.where(active, 1 - retained / seen, self._removed_now))
        self._removed.add_(torch.where(active, self._removed_now, 0))
        self._counted.add_(active)
        self._peak.copy_(torch.where(active, torch.maximum(self._peak, held.amax((0, 2))), self._peak))
        evicted = (self._rows.lengths[None, :, None] - held).sum((0, 2))
        self._evicted.copy_(torch.where(active, evicted, self._evicted))
        self._held.add_((held * active[:, None]).sum(1))
        self._notes.add_(active.sum())
        self._violations.add_(((held > self._budget) & active[None, :, None]).sum())

    def close(self, rows: Sequence[int]) -> None:
        """The requests in these rows have ended."""
        for row in rows:
            self._closed.append(
                _Closed(
                    removed=float(self._removed[row]),
                    steps=int(self._counted[row]),
                    removed_at_end=float(self._removed_now[row]),
                    peak=int(self._peak[row]),
                    evictions=int(self._evicted[row]),
                )
            )

    def result(self) -> Audit:
        """Totals over all requests that ended.

        Raises:
            KvbenchError: the policy's charged state has grown beyond what it pays for.
        """
        rows = len(self._rows.ids)
        heads = self._held.double() / self._notes
        return _audit(
            self._closed,
            self._managed,
            self._sliding,
            self._policy,
            rows,
            self._reference,
            int(self._violations),
            heads,
        )


class PassageAuditor:
    """Watches one `score` call, a batch of fresh rows at a time."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._windows = sliding_windows(setting.loaded.model.config)
        self._layers: Sequence[Layer] = ()
        self._closed: list[_Closed] = []
        self._violations = 0
        self._entries = torch.zeros((), dtype=torch.int64)

    def held(self, layers: Sequence[Layer]) -> Tensor:
        """Entries that each layer, row and head holds now [L, R, H], from the positions tensors of managed layers."""
        return torch.stack([(layer.slots.positions >= 0).sum(-1) for layer in self.managed(layers)])

    def managed(self, layers: Sequence[T]) -> list[T]:
        """Those of one thing a layer whose layers a policy manages."""
        return [layer for layer, window in zip(layers, self._windows, strict=True) if window is None]

    def batch(self, layers: Sequence[Layer], lengths: Sequence[int], held: Tensor, seen: Tensor) -> None:
        """Rows have ended after `lengths` tokens; they had `held` [L, R, H, n] entries when they had `seen` [n] tokens."""
        self._layers = layers
        removed = 1 - held.double().mean((0, 2)) / seen
        over = held > self._setting.split.slots
        for row, length in enumerate(lengths):
            # A longer row's tokens beyond this one's end are not its own.
            steps = int((seen <= length).sum())
            self._violations += int(over[:, row, :, :steps].sum())
            self._entries = self._entries.to(held.device) + held[:, row, :, :steps].sum(-1)
            self._closed.append(
                _Closed(
                    removed=float(removed[row, :steps].sum()),
                    steps=steps,
                    removed_at_end=float(removed[row, steps - 1]),
                    peak=int(held[:, row, :, :steps].max()),
                    evictions=int((length - held[:, row, :, steps - 1]).sum()),
                )
            )

    def result(self) -> Audit:
        """Totals over all rows; bytes are those of the last batch, since all rows have slots of one size.

        Raises:
            KvbenchError: the policy's charged state has grown beyond what it pays for.
        """
        sliding = [layer for layer, window in zip(self._layers, self._windows, strict=True) if window is not None]
        rows = len(self._layers[0].slots.keys)
        return _audit(
            self._closed,
            self.managed(self._layers),
            sliding,
            self._setting.policy,
            rows,
            self._setting.reference_length,
            self._violations,
            self._entries.double() / sum(request.steps for request in self._closed),
        )


def _audit(
    closed: Sequence[_Closed],
    managed: Sequence[Layer],
    sliding: Sequence[Layer],
    policy: Policy,
    rows: int,
    reference: int,
    violations: int,
    entries: Tensor,
) -> Audit:
    check_charged_state(managed, policy)
    # fsum: the order in which requests ended leaves no trace, not even in the last bit.
    peak = max(request.peak for request in closed)
    kv, state, metadata = live_bytes(managed)
    return Audit(
        slots=max(layer.slots.capacity for layer in managed),
        peak=peak,
        violations=violations,
        cr_mean=fsum(request.removed for request in closed) / sum(request.steps for request in closed),
        cr_peak=1 - peak / reference,
        cr_end=fsum(request.removed_at_end for request in closed) / len(closed),
        kv_bytes=kv // rows,
        scorer_bytes=state // rows,
        metadata_bytes=metadata // rows,
        evictions=sum(request.evictions for request in closed),
        sliding_bytes=sum(live_bytes(sliding)) // rows,
        head_entries=tuple(tuple(layer) for layer in entries.tolist()),
        free=not policy.hard_budget,
    )


def check_charged_state(managed: Sequence[Layer], policy: Policy) -> None:
    """Refuses a policy that stores more than the slots that it gave up would have held.

    Raises:
        KvbenchError: in some layer, the bytes of charged state per row and KV head exceed those of the charged slots.
    """
    if not policy.hard_budget:
        return
    for layer in managed:
        keys, charged = layer.slots.keys, layer.split.charged
        stored = bytes_of(layer.state.charged()) / (keys.shape[0] * keys.shape[1])
        paid = charged * 2 * keys.shape[3] * keys.element_size()
        if stored > paid:
            raise KvbenchError(
                f"Policy '{policy.name}' keeps {stored:.0f} bytes of charged state in each layer and KV head, but "
                f"its {charged} charged slots pay for {paid} with keys and values in {_name(keys.dtype)}; "
                "charge more slots, or run it with a wider number type."
            )


def live_bytes(layers: Sequence[Layer]) -> tuple[int, int, int]:
    """(keys and values, policy state, positions and priorities and rings) in bytes."""
    slots = [layer.slots for layer in layers]
    return (
        sum(bytes_of((one.keys, one.values)) for one in slots),
        sum(bytes_of(layer.state.tensors()) for layer in layers),
        sum(bytes_of((one.positions, one.priority, one.recent)) for one in slots),
    )


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
