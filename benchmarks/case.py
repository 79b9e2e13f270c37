"""One layer with full slots, at the sizes that are timed: the reference model's on a CPU, Qwen3-4B's on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.core.policy import Geometry, LearnedPolicy, Policy, Split, StateRequest
from kvbench.core.slots import Slots
from kvbench.engine.layer import Layer, Step
from kvbench.plugins import load_registry


@dataclass(frozen=True)
class Case:
    """Sizes of one layer, and where it lies."""

    name: str
    device: torch.device
    dtype: torch.dtype
    rows: int
    geometry: Geometry
    slots: int

    def __str__(self) -> str:
        return self.name

    def new(self, heads: int) -> Tensor:
        """One random token a row [R, heads, 1, D]."""
        return torch.randn(self.rows, heads, 1, self.geometry.head_dim, dtype=self.dtype, device=self.device)

    def new_pair(self) -> tuple[Tensor, Tensor]:
        """Key and value of one random token a row [R, H, 1, D]."""
        return self.new(self.geometry.kv_heads), self.new(self.geometry.kv_heads)

    def layer(self, policy: Policy) -> Layer:
        """A layer under `policy` with every slot filled; what it has learned is random."""
        split = policy.checked_split(self.slots, self.geometry)
        scorer = policy.scorer(self.geometry) if isinstance(policy, LearnedPolicy) else None
        request = StateRequest(
            0,
            self.rows,
            self.geometry,
            split,
            torch.zeros(self.rows, dtype=torch.int64, device=self.device),
            self.device,
            scorer=scorer.to(self.device) if scorer is not None else None,
            dtype=self.dtype,
            reference_length=8 * self.slots,
        )
        return Layer(split, self.filled(split), policy.state(request), frees=not policy.hard_budget)

    def filled(self, split: Split) -> Slots:
        """Slots that hold the newest tokens in order, with random contents and priorities."""
        heads, dim = self.geometry.kv_heads, self.geometry.head_dim
        slots = Slots.empty(
            self.rows, heads, split.slots, dim, split.sinks, split.window, dtype=self.dtype, device=self.device
        )
        slots.keys.normal_()
        slots.values.normal_()
        order = torch.arange(split.slots, device=self.device)
        slots.positions.copy_(order)
        slots.priority.copy_(torch.rand_like(slots.priority))
        slots.priority[..., : split.sinks] = torch.inf
        slots.priority[..., split.slots - split.window :] = torch.inf
        newest = order[split.slots - split.window :]
        slots.recent[..., newest % split.window] = newest
        return slots

    def step(self, position: int) -> Step:
        """All rows feed the token at `position`."""
        return Step(torch.full((self.rows,), position, device=self.device), position + 1, position + 1)


CPU = [Case("ref-cpu", torch.device("cpu"), torch.float32, 32, Geometry(4, 8, 2, 32), 128)]
CUDA = [
    Case(f"qwen3-4b-cuda-{rows}", torch.device("cuda"), torch.bfloat16, rows, Geometry(36, 32, 8, 128), 4096)
    for rows in (1, 16, 64)
]

Piece = Callable[[], object]
"""A call that is timed."""

Make = Callable[[], Piece]
"""Makes one with tensors of its own."""

Timed = Callable[[Case, Make, int], None]
"""Times what is made, beside the bytes that one call must move."""


def nbytes(*tensors: Tensor) -> int:
    """Bytes of tensors, together."""
    return sum(tensor.nbytes for tensor in tensors)


def weights(state: object) -> int:
    """Bytes of the trained modules that a policy's state reads at every step."""
    return sum(nbytes(*part.parameters()) for part in vars(state).values() if isinstance(part, nn.Module))


def policy_named(name: str) -> Policy:
    """A registered policy with its own defaults."""
    made = load_registry().policy(name).load()
    assert isinstance(made, type)
    policy = made()
    assert isinstance(policy, Policy)
    return policy
