"""The contract between a policy and everything that runs it.

A `Policy` is a frozen dataclass of hyper-parameters. For one run of one layer it makes a `State`, which owns the
tensors. The engine asks the state for priorities; it never asks which entry to drop: the victim is always the lowest
priority, on a tie the lowest position.

Two kinds of state exist:

- `StaticState`: a token's priority is final at the moment it leaves the protected window. Its prompt is processed in
  parallel under the running top-k mask, and keeps exactly what token by token keeps.
- `ObservedState`: priorities follow the attention weights of every step. Its long prompts are processed in chunks.

Shapes: R rows, H KV heads, Hq query heads, T new tokens, B slots, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn

from kvbench.core.errors import KvbenchError

if TYPE_CHECKING:
    from kvbench.core.slots import Slots


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model's attention that a policy may depend on; only layers with a full (not sliding) cache."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class Split:
    """How a policy divides its budget in each layer and KV head.

    Attributes:
        slots: K/V entries that the cache may hold (B).
        sinks: first tokens of the sequence that are never evicted (s).
        window: newest tokens that are never evicted, the current one included (w >= 1).
        charged: slots paid for state that grows with the head instead of K/V entries.
    """

    slots: int
    sinks: int
    window: int
    charged: int = 0

    @property
    def long(self) -> int:
        """Slots for tokens that are neither sink nor window (k)."""
        return self.slots - self.sinks - self.window


@dataclass(frozen=True)
class Tokens:
    """Tokens of one layer: keys and values [R, H, T, D] as they are cached (after RoPE), positions [R, T]."""

    keys: Tensor
    values: Tensor
    positions: Tensor


@dataclass(frozen=True)
class StateRequest:
    """What a policy gets to make the state of one layer.

    Attributes:
        layer: index among the layers that evict.
        rows: sequences processed side by side (R).
        geometry: of the model.
        split: of the budget.
        seeds: random stream of each row [R], int64.
        device: where the state's tensors live.
        scorer: this layer's trained module, None for policies that are not learned.
        dtype: of keys and values, and so of state that is charged in their slots.
        reference_length: tokens that the dense cache is taken to hold.
        kernels: the state may use compiled kernels of its own in `step`.
    """

    layer: int
    rows: int
    geometry: Geometry
    split: Split
    seeds: Tensor
    device: torch.device
    scorer: nn.Module | None = None
    dtype: torch.dtype = torch.float32
    reference_length: int = 0
    kernels: bool = False

    @property
    def kept_share(self) -> float:
        """Share of the tokens outside sinks and window that fits the budget once the dense cache is full."""
        return kept_share(self.split, self.reference_length)


def kept_share(split: Split, reference_length: int) -> float:
    """Share of the tokens outside sinks and window that `split` has room for in a sequence of the reference length."""
    return split.long / max(split.long, reference_length - split.sinks - split.window)


class State:
    """Tensors of one run of one layer. The first dimension of each is the row."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that must follow a row when it is refilled; also what the audit counts."""
        return ()

    def charged(self) -> tuple[Tensor, ...]:
        """Those of `tensors` that grow with the head and are paid for by `Split.charged`.

        Their bytes per row and KV head may not exceed those of that many slots' keys and values: the audit refuses more.
        What is kept per head or per slot as one number (a stabiliser, priorities) is metadata: reported, not charged.
        """
        return ()


class StaticState(State, ABC):
    """Priorities that are final when a token leaves the window.

    Of a policy without a hard budget, -inf means: evicted at once, whatever room there is.
    """

    @abstractmethod
    def step(self, new: Tokens, leaving: Tokens) -> Tensor:
        """Takes note of the newest tokens (T = 1) and returns the priority [R, H] of the tokens that leave the window.

        `leaving` is the token `window` positions earlier; where a row has none yet its content is arbitrary and the
        returned priority is ignored. Must not allocate by data, synchronise with the host, or branch on values.
        """

    @abstractmethod
    def prefill(self, tokens: Tokens) -> Tensor:
        """Reads a whole prompt from position 0 in parallel, leaves the state as `step` would, and returns [R, H, T].

        Only the priorities of tokens that have left the window (t <= T - 1 - window) are used.
        """


class PointwiseState(StaticState):
    """A static priority that depends on nothing but the token itself."""

    @abstractmethod
    def priority(self, tokens: Tokens) -> Tensor:
        """Priorities [R, H, T]."""

    def step(self, new: Tokens, leaving: Tokens) -> Tensor:
        return self.priority(leaving)[..., 0]

    def prefill(self, tokens: Tokens) -> Tensor:
        return self.priority(tokens)


class ObservedState(State, ABC):
    """Priorities that follow the attention weights."""

    @abstractmethod
    def observe(self, weights: Tensor, slots: Slots) -> None:
        """Writes new priorities after an attention step.

        Args:
            weights: softmax over the retained slots [R, Hq, T, B], fp32, zero on empty slots.
            slots: the layer's cache; `slots.set_priority(priority [R, H, B])` stores the ranking (sinks, the window and
                empty slots keep theirs).
        """


@dataclass(frozen=True)
class Policy(ABC):
    """Frozen, hashable hyper-parameters of one eviction policy.

    Class attributes that a policy may override:
        name: as registered.
        hard_budget: the number of stored entries never exceeds the budget. A policy without gets as many slots as
            tokens, and evicts what it gives the priority -inf.
        learned: needs a checkpoint (a scorer, an adapted LM, or both).
        static: `state` returns a StaticState; prefill is then exact, otherwise chunked for prompts over budget.
    """

    name: ClassVar[str]
    hard_budget: ClassVar[bool] = True
    learned: ClassVar[bool] = False
    static: ClassVar[bool] = True

    @property
    def needs_attention(self) -> bool:
        """Whether the engine must compute explicit attention weights."""
        return not self.static

    @property
    def evicts(self) -> bool:
        """False only for `full`: as many slots as tokens."""
        return True

    @abstractmethod
    def split(self, budget: int, geometry: Geometry) -> Split:
        """Divides `budget` slots. Call `checked_split` instead, which refuses a budget that is too small."""

    def smallest_budget(self, geometry: Geometry) -> int:
        """The fewest slots that this policy can work with."""
        free = self.split(1, geometry)
        return 1 - free.long + 1 if self.evicts else 1

    def checked_split(self, budget: int, geometry: Geometry) -> Split:
        """`split`, or one sentence when the budget is below the policy's smallest.

        Raises:
            KvbenchError: `budget` is below `smallest_budget(geometry)`.
        """
        smallest = self.smallest_budget(geometry)
        if budget < smallest:
            raise KvbenchError(
                f"Policy '{self.name}' needs a budget of at least {smallest} slots; this one has {budget}."
            )
        return self.split(budget, geometry)

    @abstractmethod
    def state(self, request: StateRequest) -> State:
        """Fresh state of one layer."""


class Scorer(nn.Module, ABC):
    """The trained module of one layer: cached K and V -> raw score of each token, per KV head with its own weights."""

    @abstractmethod
    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Raw scores [R, H, S] in fp32 of all tokens in parallel, from keys and values [R, H, S, D].

        The score of token t may use tokens up to t + window, the step at which it leaves the window, never later ones.
        Scores of the last `window` tokens are arbitrary.
        """

    @abstractmethod
    def log_decay(self) -> Tensor:
        """Log gamma [H], at most 0: the priority of token t is `score_t - t * log_gamma` (docs/kvpop.md 2.1)."""

    def priority(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Static priority in fp32 from raw scores [R, H, T] and positions [R, T]."""
        return scores.float() - positions[:, None].float() * self.log_decay()[None, :, None]


class Gate(Scorer, ABC):
    """A scorer whose score is the log-odds of keeping the token, trained by relaxed decisions (docs/kvpop.md 9).

    Attributes:
        temperature: of the relaxation.
        detached: the gate reads keys and values without handing a gradient back to the LM.
    """

    temperature: float
    detached: bool

    def log_decay(self) -> Tensor:
        """A decision does not age: zeros [H]."""
        return next(self.parameters()).new_zeros(next(self.parameters()).shape[0])


@dataclass(frozen=True)
class LearnedPolicy(Policy, ABC):
    """A policy with trained weights: a scorer per layer and, usually, an adapted LM.

    Attributes of the policy that training fixes are read from the checkpoint, never from the command line.
    """

    learned: ClassVar[bool] = True

    def scorer(self, geometry: Geometry) -> Scorer | None:
        """A fresh, untrained scorer for one layer; None when only the LM is trained."""
        return None


class GatedPolicy(LearnedPolicy, ABC):
    """A learned policy whose scorers are gates, matched to a budget by one offset for all of them."""

    @abstractmethod
    def offset(self, share: float) -> float:
        """What a gate's score has to exceed for the token to stay, if the share `share` of all tokens is to be kept."""

    @abstractmethod
    def calibrated(self, shifts: Sequence[tuple[float, float]]) -> Self:
        """The policy with (share, shift) pairs: by how much `offset` is wrong for these gates at these shares."""
