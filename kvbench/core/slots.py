"""A fixed number of K/V entries per layer and KV head, overwritten in place.

Empty slots hold priority -inf and the negative position `slot - B`: they lose every comparison, and are filled in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LATEST = torch.iinfo(torch.int32).max


@dataclass
class Slots:
    """The cache of one layer.

    Attributes:
        keys, values: [R, H, B, D], as the model wrote them (keys after RoPE).
        positions: index of each entry in its sequence [R, H, B], int32, negative when empty.
        priority: higher = keep [R, H, B], fp32; +inf protected, -inf empty.
        recent: slot of the token at position p, at index p % window [R, H, w], int64.
        sinks, window: protected tokens.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    priority: Tensor
    recent: Tensor
    sinks: int
    window: int

    @classmethod
    def empty(
        cls,
        rows: int,
        heads: int,
        slots: int,
        dim: int,
        sinks: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Slots:
        """A cache without entries."""
        shape = (rows, heads, slots)
        vacant = torch.arange(-slots, 0, dtype=torch.int32, device=device)
        return cls(
            keys=torch.zeros(*shape, dim, dtype=dtype, device=device),
            values=torch.zeros(*shape, dim, dtype=dtype, device=device),
            positions=vacant.expand(shape).clone(),
            priority=torch.full(shape, -torch.inf, device=device),
            recent=torch.zeros(rows, heads, window, dtype=torch.int64, device=device),
            sinks=sinks,
            window=window,
        )

    @property
    def capacity(self) -> int:
        """Slots per row and KV head (B)."""
        return self.keys.shape[2]

    def tensors(self) -> tuple[Tensor, ...]:
        """All storage; the first dimension is the row."""
        return self.keys, self.values, self.positions, self.priority, self.recent

    def grow(self, slots: int) -> None:
        """Makes it `slots` in all, the further ones empty; for caches with a slot for every token."""
        rows, heads, held, dim = self.keys.shape
        wider = Slots.empty(
            rows, heads, slots, dim, self.sinks, self.window, dtype=self.keys.dtype, device=self.keys.device
        )
        self.positions = torch.where(self.positions < 0, self.positions - (slots - held), self.positions)
        for name in ("keys", "values", "positions", "priority"):
            fresh = getattr(wider, name)
            fresh[:, :, :held] = getattr(self, name)
            setattr(self, name, fresh)

    def set_priority(self, priority: Tensor) -> None:
        """Stores priorities [R, H, b] of the first b slots. Sinks, the window and empty slots keep theirs."""
        extent = priority.shape[-1]
        positions = self.positions[..., :extent]
        # The window of the next token, before which the next victim is chosen.
        leaving = self.positions.amax(-1, keepdim=True) + 1 - self.window
        protected = (positions < self.sinks) | (positions > leaving)
        ranked = unprotected(priority).masked_fill(protected, torch.inf)
        self.priority[..., :extent] = ranked.masked_fill(positions < 0, -torch.inf)


def unprotected(priority: Tensor) -> Tensor:
    """Any policy's priorities in fp32, always below what is protected: NaN as -inf, +inf as the largest finite number."""
    return priority.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def victims(priority: Tensor, positions: Tensor) -> Tensor:
    """The slot [R, H] to overwrite: lowest priority, on a tie the lowest position. Inputs [R, H, B]."""
    lowest = priority.amin(-1, keepdim=True)
    return torch.where(priority == lowest, positions, _LATEST).argmin(-1)


def several_victims(priority: Tensor, positions: Tensor, count: int) -> Tensor:
    """The `count` slots [R, H, count] to overwrite, in the order in which `victims` would name them."""
    by_position = positions.argsort(-1)
    order = priority.gather(-1, by_position).argsort(dim=-1, stable=True)[..., :count]
    return by_position.gather(-1, order)
