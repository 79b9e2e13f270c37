"""The coordinates of one measurement. Nothing here imports torch.

Two keys are derived from them. `key` covers everything that can change a number of the row: a row with the same
key is never computed again. `twin_key` covers what has to be equal for two rows to be compared: rows are paired
with their dense twins by it, problem by problem.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

MEASUREMENT_VERSION = 1
"""Raised whenever the same cell would give other numbers than before: it is part of every key."""

Role = Literal["policy", "dense", "dense_adapted"]
"""`dense` is the denominator of every relative number; `dense_adapted` is the same on a checkpoint's LM."""

_KEY_LENGTH = 16
_PURELY_POLICY = frozenset({"policy", "policy_args", "checkpoint", "adapted_lm", "slots", "reference_length"})
# The ratio as somebody wrote it cannot change a number: 7/8 and 0.875 are one cell.
_NEVER_IN_KEY = frozenset({"model", "cr", "problems_requested"})
# Came later than the first published rows: a cell without them has the key that it always had.
_IN_KEY_IF_GIVEN = frozenset({"data_revision", "chat_template"})


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One policy at one budget on one task, length and seed.

    Attributes:
        model: as named on the command line.
        weights_hash: SHA-256 of the model's weights.
        policy: registered name.
        policy_args: hyper-parameters that were given, as (name, value) sorted by name.
        checkpoint: hash of the policy's trained weights; None when it has none.
        adapted_lm: hash of the LM weights that replace the model's own; None on the base model.
        task: registered name.
        task_version: of the task's problems and grader.
        gen_length: generation cap in new tokens.
        slots: budget per layer and KV head; None for `full`.
        cr: requested ratio as it was written; None when a budget was given or the cell is dense.
        reference_length: tokens that the dense cache is taken to hold.
        problems: how many of the task's problems.
        problems_requested: how many were asked for when the task has fewer, else None.
        data_revision: of the data set that the problems come from; None when they are generated.
        chat_template: through which prompts go: its hash, or `plain` when the tokenizer has none; None for a task whose
            prompts are not a user's messages.
        samples: completions of each problem.
        seed: of problems, sampling and random policies.
        temperature: of sampling; 0 is greedy.
        top_p: nucleus of sampling.
        top_k: most candidates of sampling; 0 is all.
        dtype: `float32` or `bfloat16`.
        device: `cpu` or `cuda`.
        rows: sequences side by side: the last bits of a batched product depend on it.
        attention: decode path that was asked for (docs/decode.md).
        version: `MEASUREMENT_VERSION` of the code.
    """

    model: str
    weights_hash: str
    policy: str
    policy_args: tuple[tuple[str, str], ...] = ()
    checkpoint: str | None = None
    adapted_lm: str | None = None
    task: str
    task_version: int
    gen_length: int
    slots: int | None
    cr: str | None
    reference_length: int
    problems: int
    samples: int
    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    dtype: str
    device: str
    rows: int
    attention: str = "auto"
    problems_requested: int | None = None
    data_revision: str | None = None
    chat_template: str | None = None
    version: int = MEASUREMENT_VERSION

    @cached_property
    def key(self) -> str:
        """Identity of the measurement: the resume key."""
        return digest(self._record(without=_NEVER_IN_KEY))

    @cached_property
    def twin_key(self) -> str:
        """Equal for all rows that may be paired: the same model, problems, samples and arithmetic."""
        return digest(self._record(without=_NEVER_IN_KEY | _PURELY_POLICY))

    @property
    def role(self) -> Role:
        """Whether the row is a denominator, and which of the two."""
        if self.policy != "full":
            return "policy"
        return "dense" if self.adapted_lm is None else "dense_adapted"

    def stream(self, problem: str, sample: int) -> int:
        """Seed of the random stream of one completion: 63 bits; batch and policy have no part in it."""
        text = json.dumps([self.task, self.task_version, self.seed, problem, sample])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def _record(self, without: frozenset[str]) -> dict[str, object]:
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in without}
        return {name: value for name, value in record.items() if value is not None or name not in _IN_KEY_IF_GIVEN}


def digest(record: Mapping[str, object] | str) -> str:
    """Short SHA-256 of canonical JSON."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]
