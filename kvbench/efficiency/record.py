"""The record of one measurement of cost: where, what, how it ended. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from kvbench.core.cell import digest
from kvbench.core.errors import KvbenchError
from kvbench.core.result import Environment
from kvbench.rows import read_lines

SCHEMA_VERSION = 1
"""Of the rows: raised when a field changes its meaning or goes away. A new field that may be null does not raise it."""

MEASUREMENT_VERSION = 1
"""Raised whenever the same cell would be measured in another way: it is part of every key."""

ROWS = "efficiency.jsonl"
"""The file of a result folder, one row a line."""

Status = Literal["ok", "out_of_memory", "failed", "skipped"]

# As it was written: 7/8 and 0.875 are one cell.
_NEVER_IN_KEY = frozenset({"model", "cr"})


@dataclass(frozen=True, kw_only=True)
class EfficiencyCell:
    """One policy at one budget, length and batch size.

    Attributes:
        source: whose decode loop it is: `kvbench`, `transformers VERSION`, `kvpress VERSION`.
        model: name of the shape or model.
        weights_hash: of the weights, or of the shape and `random`.
        weights: `random` (cost only, never quality) or `real`.
        policy: registered name; a peer's own name for a method.
        policy_args: hyper-parameters that differ from the defaults, as `name=value`, joined by commas.
        scorer: of a learned policy with a scorer: `random`, or the hash of its checkpoint; else null.
        cr: requested fraction removed as it was written; null for slots and for `full`.
        slots: budget per layer and KV head; null for `full`.
        reference_length: tokens that the dense cache is taken to hold.
        gen_length: tokens that the cache has seen when steps are timed.
        batch_asked: sequences side by side; null for the largest number that fits.
        memory_limit: bytes that the largest batch may take; null for the whole device.
        prompt_length: tokens of the prompts whose reading is timed.
        steps: timed steps.
        points: lengths up to `gen_length` at which steps are timed.
        whole: the generation is also done in full.
        audited: the step also counts what is stored, as `kvbench run` does.
        decode_path: how the step was asked to run.
        heads: where the lengths of the heads of a policy without a hard budget come from; null for the others.
        dtype, device, device_name: number type of the model, `cpu` or `cuda`, and what the device calls itself.
        version: `MEASUREMENT_VERSION` of the code.
    """

    source: str
    model: str
    weights_hash: str
    weights: Literal["random", "real"]
    policy: str
    policy_args: str = ""
    scorer: str | None = None
    cr: str | None = None
    slots: int | None = None
    reference_length: int
    gen_length: int
    batch_asked: int | None
    memory_limit: int | None = None
    prompt_length: int
    steps: int
    points: int = 1
    whole: bool = False
    audited: bool = False
    decode_path: str = "auto"
    heads: str | None = None
    dtype: str
    device: str
    device_name: str
    version: int = MEASUREMENT_VERSION

    @cached_property
    def key(self) -> str:
        """Identity of the measurement: the resume key."""
        return digest({f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NEVER_IN_KEY})


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured. Times in milliseconds unless the name says seconds (`_s`), memory and traffic in bytes.

    Attributes:
        path: how the step ran: `plain` or `cuda_graph`.
        batch: sequences side by side.
        capacity: slots of a layer and KV head.
        entries: retained entries of a layer, row and KV head when the last step had run, mean.
        ms_per_step, ms_lo, ms_hi, n: median, quartiles and number of the timed steps.
        tokens_per_s: `batch` over the median.
        bandwidth: bytes a second that copies and a sum move on the device at most, in the same run.
        moved_weights, moved_kv, moved_metadata, moved_scorer, moved_state: bytes that a step has to move.
        floor_ms: their sum over the bandwidth.
        floor_ratio: `ms_per_step` over `floor_ms`.
        prefill_ms, prefill, prefill_peak: reading `batch` prompts of the cell's prompt length: median time, `exact` or
            `chunked`, peak memory.
        memory: `measured` by the device's allocator, or `counted` from tensors, which is no claim about a peak.
        peak_memory: while steps ran.
        weights_bytes, kv_bytes, scorer_bytes, metadata_bytes, state_bytes: the model; all rows' keys and values; the
            scorers' parameters; priorities, positions and rings; the policy's state.
        workspace_bytes: the peak less all of these: activations, logits, what capture needs. Null where memory is counted.
        baseline_ms: the same with `streaming_llm` in as many slots.
        scoring_ms, scoring_share: `ms_per_step` less `baseline_ms`, and its share of `ms_per_step`: what choosing the
            victim adds, and the attention weights that it needs.
        curve: (length, median) of the timed lengths, the last one included.
        generation_s, generation_tokens_per_s: sum of the steps of a whole generation along the curve; tokens a second.
        whole_s, whole_setup_s: the same generation in full, and what capturing took of it.
        whole_ratio: `whole_s` over `generation_s`.
        head_lengths: retained entries of each KV head of each layer that the slots were filled with.
        notes: what could not be measured and why.
    """

    path: str
    batch: int
    capacity: int
    entries: float
    ms_per_step: float
    ms_lo: float
    ms_hi: float
    n: int
    tokens_per_s: float
    bandwidth: float
    moved_weights: int
    moved_kv: int
    moved_metadata: int
    moved_scorer: int
    moved_state: int
    floor_ms: float
    floor_ratio: float
    prefill_ms: float | None = None
    prefill: str | None = None
    prefill_peak: int | None = None
    memory: Literal["measured", "counted"]
    peak_memory: int
    weights_bytes: int
    kv_bytes: int
    scorer_bytes: int
    metadata_bytes: int
    state_bytes: int
    workspace_bytes: int | None = None
    baseline_ms: float | None = None
    scoring_ms: float | None = None
    scoring_share: float | None = None
    curve: tuple[tuple[int, float], ...] = ()
    generation_s: float | None = None
    generation_tokens_per_s: float | None = None
    whole_s: float | None = None
    whole_setup_s: float | None = None
    whole_ratio: float | None = None
    head_lengths: tuple[tuple[int, ...], ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EfficiencyResult:
    """One row: a cell, its figures, how it ended and on what.

    Attributes:
        cell: coordinates.
        status, reason: `ok`, `out_of_memory`, `failed` or `skipped`, and why in one sentence.
        figures: None unless the status is `ok`.
        command: command line that made the row.
        commit: of kvbench, or null.
        environment: versions and machine.
    """

    cell: EfficiencyCell
    status: Status
    reason: str | None = None
    figures: Figures | None = None
    command: str
    commit: str | None
    environment: Environment

    @property
    def key(self) -> str:
        """The cell's."""
        return self.cell.key

    def record(self) -> dict[str, Any]:
        """Everything by its name, in one level but for the environment."""
        measured = {f.name: None for f in dataclasses.fields(Figures)}
        if self.figures is not None:
            measured = dataclasses.asdict(self.figures)
        return {
            "schema_version": SCHEMA_VERSION,
            "key": self.key,
            **dataclasses.asdict(self.cell),
            "status": self.status,
            "reason": self.reason,
            **measured,
            "command": self.command,
            "commit": self.commit,
            "environment": dataclasses.asdict(self.environment),
        }

    def to_json(self) -> str:
        """One line without its end."""
        return json.dumps(self.record(), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read one line.

        Raises:
            KvbenchError: the row is of another schema; ValueError: the line is not JSON.
        """
        record: Any = json.loads(line)
        found = record.get("schema_version") if isinstance(record, dict) else None
        if found != SCHEMA_VERSION:
            raise KvbenchError(f"A row has schema version {found}; this kvbench reads version {SCHEMA_VERSION}.")
        try:
            return cls(
                cell=EfficiencyCell(**_fields(EfficiencyCell, record)),
                status=record["status"],
                reason=record["reason"],
                figures=_figures(record) if record["status"] == "ok" else None,
                command=record["command"],
                commit=record["commit"],
                environment=Environment(**record["environment"]),
            )
        except (KeyError, TypeError) as error:
            raise KvbenchError(f"A row lacks the fields of schema version {SCHEMA_VERSION}: {error}.") from error


def read_rows(folder: Path) -> list[EfficiencyResult]:
    """The rows of a folder; see `kvbench.rows.read_lines`.

    Raises:
        KvbenchError: the folder has no such file, or a complete line is not a row of this schema.
    """
    path = folder / ROWS
    if not path.is_file():
        raise KvbenchError(
            f"The folder {folder} holds no rows ({ROWS}); give the --out folder of 'kvbench efficiency'."
        )
    return read_lines(path, EfficiencyResult.from_json)


def _figures(record: Mapping[str, Any]) -> Figures:
    fields = _fields(Figures, record)
    heads = fields.get("head_lengths")
    return Figures(
        **{
            **fields,
            "curve": tuple((int(length), float(ms)) for length, ms in fields["curve"]),
            "head_lengths": None if heads is None else tuple(tuple(layer) for layer in heads),
            "notes": tuple(fields["notes"]),
        }
    )


def _fields(kind: type[EfficiencyCell | Figures], record: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the record's values that belong to a class; fields that came later may be missing."""
    return {f.name: record[f.name] for f in dataclasses.fields(kind) if f.name in record}
