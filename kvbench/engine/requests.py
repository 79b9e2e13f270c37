"""What goes into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One problem and sample to complete.

    Attributes:
        prompt: token ids.
        max_new: generation cap in tokens.
        seed: of its own random stream; what shares a batch with it does not matter.
    """

    prompt: tuple[int, ...]
    max_new: int
    seed: int = 0


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: greedy at temperature 0, else temperature, then top-k, then top-p."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Completion:
    """One answer, in the order of the requests.

    Attributes:
        tokens: new token ids, the end-of-sequence token included when it was produced.
        finish: `eos`, `length` or `stop`.
        near_ties: steps at which the two best scores that decide lay within rounding of each other.
    """

    tokens: tuple[int, ...]
    finish: str
    near_ties: int


@dataclass(frozen=True)
class Audit:
    """Counted from the tensors, never from the configuration.

    Attributes:
        slots: entries that a layer and KV head may hold; the tensors have no more.
        peak: most entries seen in any layer, head, row and step.
        violations: layer, head and step combinations over budget (0 unless a policy is broken).
        cr_mean: 1 - retained / seen, mean over the steps of all requests.
        cr_peak: the same at each request's fullest step relative to the reference length: 1 - peak / reference length.
        cr_end: the same at each request's last step.
        kv_bytes: live bytes of keys and values per row.
        scorer_bytes: live bytes of the policy's state per row.
        metadata_bytes: positions, priorities and rings per row.
        sliding_bytes: everything that sliding-window layers hold per row; they are no policy's and in no other number.
        evictions: entries overwritten while they held a token.
        head_entries: mean entries of each layer and KV head over the steps of all requests.
        free: the policy has no hard budget.
    """

    slots: int
    peak: int
    violations: int
    cr_mean: float
    cr_peak: float
    cr_end: float
    kv_bytes: int
    scorer_bytes: int
    metadata_bytes: int
    evictions: int
    sliding_bytes: int
    head_entries: tuple[tuple[float, ...], ...]
    free: bool

    @property
    def entries_mean(self) -> float:
        """Mean entries over layers, KV heads and steps."""
        heads = [entries for layer in self.head_entries for entries in layer]
        return sum(heads) / len(heads)


@dataclass(frozen=True)
class Timing:
    """Wall time of one `generate` call; `ms_per_step` covers decode steps only, `tokens` counts kept new tokens."""

    prefill_seconds: float
    decode_seconds: float
    steps: int
    tokens: int

    @property
    def ms_per_step(self) -> float | None:
        return 1000 * self.decode_seconds / self.steps if self.steps else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / (self.prefill_seconds + self.decode_seconds) if self.tokens else None


@dataclass(frozen=True)
class Generation:
    """Everything one `generate` call learned.

    Attributes:
        completions: one for each request, in order.
        audit: of the whole call.
        timing: of the whole call.
        prefill: `exact` or `chunked`.
        path: how decode steps ran, by the names of `kvbench.engine.path`.
        peak_memory: bytes allocated on the device, None on CPU.
    """

    completions: tuple[Completion, ...]
    audit: Audit
    timing: Timing
    prefill: str
    path: str
    peak_memory: int | None


Stop = Callable[[int, tuple[int, ...]], bool]
"""Called with (index of the request, its new tokens so far); true ends the completion there."""

Progress = Callable[[int], None]
"""Called now and then with about the number of new tokens since the last call."""

Observer = Callable[[int, int, Tensor], None]
"""Tests only: called after each layer's step with (layer, step, positions [R, H, B])."""
