"""`Layer.decode` with compiled kernels: the same steps in as few launches, and nothing that depends on lengths on the host.

Whatever the policy, a step is: the token that leaves (1 launch, or none with `segments.py`), the policy's own step, victim and
overwrite (1), attention (1 or 2). One CUDA graph serves rows of any length, full or not. Imported only where Triton is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvbench.core.policy import ObservedState, StaticState, Tokens
from kvbench.core.slots import Slots
from kvbench.kernels.slot_attention import attend
from kvbench.kernels.slots import enter, leaving, rank

if TYPE_CHECKING:
    from kvbench.engine.layer import Layer


def decode(
    layer: Layer, query: Tensor, key: Tensor, value: Tensor, scale: float, at: Tensor, old: Tokens | None = None
) -> Tensor:
    """Query [R, Hq, 1, D], key and value [R, H, 1, D] of the tokens at positions `at` [R] -> output [R, Hq, 1, D].

    `old` are the tokens that leave, if somebody has them already.
    """
    slots, state = layer.slots, layer.state
    ranked = None
    if isinstance(state, StaticState):
        ranked = state.step(Tokens(key, value, at[:, None]), old or leaving(slots, at))
    lengths = enter(slots, key, value, at, ranked, layer.frees)
    out, weights = attend(
        query, slots.keys, slots.values, at, scale, lengths, weighing=isinstance(state, ObservedState)
    )
    if isinstance(state, ObservedState) and weights is not None:
        state.observe(weights, _Observed(**vars(slots), at=at))
    return out


@dataclass
class _Observed(Slots):
    """The same slots after the tokens at positions `at` [R] have entered."""

    at: Tensor

    def set_priority(self, priority: Tensor) -> None:
        rank(self, priority, self.at)
