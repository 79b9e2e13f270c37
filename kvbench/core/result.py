"""The durable record of a cell: one JSON line, and one grade a completion. Nothing here imports torch.

Names are what scripts rely on; a missing value is null, never zero. Relative numbers need a second row, so they are
null in a store and filled in when a table is made.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from kvbench.core.cell import Cell, Role
from kvbench.core.errors import KvbenchError

SCHEMA_VERSION = 1
"""Of `Result`: raised when a field changes its meaning or goes away. A new field that may be null does not raise it."""

Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a number was measured with.

    Attributes:
        python, torch, transformers, kvbench: versions.
        dirty: whether the checkout had changes that are not in `commit`; None when unknown.
        platform: operating system and processor architecture.
        device_name: as the device calls itself.
        threads: CPU threads of torch.
        processes: that measured cells side by side on the machine; speed is that of one.
    """

    python: str
    torch: str
    transformers: str
    kvbench: str
    dirty: bool | None
    platform: str
    device_name: str
    threads: int
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class GradeRecord:
    """What the grader said about one completion.

    Attributes:
        key: of the cell.
        problem: identity of the problem within its task.
        sample: which completion of the problem.
        correct: the score, 0 or 1 unless a task grades in between.
        steps_correct: share of steps right before the first error; None for tasks without steps.
        tokens: length of the completion.
        finished: it ended by itself, not at the cap.
        near_ties: steps at which the two best logits lay within rounding.
        digest: short SHA-256 of the completion's text: whether two policies wrote the same.
        extracted: what the grader took for the answer; None: there was none, or the task does not say.
    """

    key: str
    problem: str
    sample: int
    correct: float
    steps_correct: float | None
    tokens: int
    finished: bool
    near_ties: int
    digest: str
    extracted: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row: coordinates, what was measured, how it ended and on what.

    Attributes:
        schema_version: of this record.
        key: resume key of the cell.
        twin_key: equal for rows that may be paired.
        role: `policy`, or which dense twin.
        model, weights_hash, tokenizer_hash: the model.
        random_weights: the model's weights are random: cost only, never quality.
        policy, policy_args, checkpoint, adapted_lm: the policy; arguments as `name=value`, hashes of trained weights.
        variant: what the policy's training changed of its recipe.
        task, task_version, held_out: the task; whether every policy's training left its family out.
        gen_length: generation cap.
        cr: requested fraction removed; 0 for `full`.
        cr_requested: as it was written, `7/8`; null when slots were asked for or for `full`.
        budget: requested slots per layer and KV head; null for `full`.
        reference_length: tokens that the dense cache is taken to hold.
        n: problems of the cell.
        n_requested: how many were asked for when the data set has fewer; else null.
        data_revision: of the data set: commit on the hub, or `sha256:` and the hash of a local copy; null without one.
        chat_template: hash of the template that prompts went through; `plain`: the tokenizer has none; null: prompts are
            no messages.
        samples: completions of each.
        temperature, top_p, top_k, seed: of sampling; `seed` also of the problems.
        dtype, device, rows, attention: number type, `cpu` or `cuda`, sequences side by side, path asked for.
        score, score_lo, score_hi: mean of `correct` and its 95 % interval, clustered by problem.
        pass_at_k, pass_at_k_lo, pass_at_k_hi: share of problems that one of the `samples` completions solves (with
            `samples` > 1).
        maj_at_n, maj_at_n_lo, maj_at_n_hi: share of problems whose most frequent answer is right (with `samples` > 1);
            null when no completion gave an answer that could vote.
        relative, relative_lo, relative_hi: score over the dense twin's on the base model, paired by problem, 95 %.
        relative_adapted, relative_adapted_lo, relative_adapted_hi: the same over the dense twin on the adapted LM.
        steps_correct, steps_correct_lo, steps_correct_hi: mean share of steps right before the first error, 95 %.
        score_finished, score_finished_lo, score_finished_hi: score of the completions that ended by themselves.
        truncated, truncated_lo, truncated_hi: share of completions that ended at the cap.
        prompt_length: mean tokens of a prompt.
        output_length, output_length_lo, output_length_hi: mean tokens of a completion.
        nll, nll_lo, nll_hi: of scored documents: mean negative log-likelihood in nats a token, 95 % over documents.
        nll_excess, nll_excess_lo, nll_excess_hi: the same less the dense base model's, paired by document.
        kl, kl_lo, kl_hi: of scored documents: KL(dense base model || this) in nats a token. `score` is then the share of
            tokens at which both have the same favourite.
        metrics: all numbers of a task of lm-eval, as a JSON object; `score` is the first of them.
        without_eviction: requests of a task of lm-eval that fit the budget, so that nothing could be evicted from them.
        feeding: of scored documents: `exact`, `token` or `chunks of c`; numbers of different feedings do not compare.
        cr_mean, cr_peak, cr_end: achieved 1 - retained / seen: mean of all steps, at the fullest step, at the end.
        slots: entries that the tensors can hold per layer and KV head.
        evictions: entries overwritten.
        violations: layer, head and step combinations over budget.
        entries_mean, entries_peak: entries of a layer and KV head, mean over steps, layers and heads, and the most ever seen;
            null for policies with a hard budget, for which they say nothing that `cr_mean` and `slots` do not.
        head_entries: mean entries of each KV head of each layer, the histogram behind `entries_mean`; null as there.
        kv_bytes, scorer_bytes, metadata_bytes: live bytes of one sequence: keys and values, the policy's state, positions and
            priorities; layers that a policy manages.
        sliding_bytes: live bytes of one sequence in sliding-window layers, which no policy manages; 0 without such layers.
        prefill: `exact` or `chunked`.
        path: attention path that ran.
        ms_per_step, tokens_per_s: decode time of one step of all rows; new tokens a second, prefill included.
        peak_memory: bytes on the device; null on CPU.
        near_ties: steps at which the two best logits lay within rounding.
        prompt_hash: of all prompts in order.
        status, reason: `ok`, `failed` or `skipped`, and why in one sentence.
        alarms: what looks wrong, computed when a table is made.
        commit: of kvbench, or null.
        environment: versions and machine; null for a skipped cell.
    """

    key: str
    twin_key: str
    role: Role
    model: str
    policy: str
    policy_args: str
    task: str
    task_version: int
    held_out: bool
    gen_length: int
    cr: float
    cr_requested: str | None
    budget: int | None
    reference_length: int
    n: int
    samples: int
    seed: int
    status: Status
    reason: str | None = None
    n_requested: int | None = None
    data_revision: str | None = None
    chat_template: str | None = None
    alarms: tuple[str, ...] = ()
    score: float | None = None
    score_lo: float | None = None
    score_hi: float | None = None
    pass_at_k: float | None = None
    pass_at_k_lo: float | None = None
    pass_at_k_hi: float | None = None
    maj_at_n: float | None = None
    maj_at_n_lo: float | None = None
    maj_at_n_hi: float | None = None
    relative: float | None = None
    relative_lo: float | None = None
    relative_hi: float | None = None
    relative_adapted: float | None = None
    relative_adapted_lo: float | None = None
    relative_adapted_hi: float | None = None
    steps_correct: float | None = None
    steps_correct_lo: float | None = None
    steps_correct_hi: float | None = None
    score_finished: float | None = None
    score_finished_lo: float | None = None
    score_finished_hi: float | None = None
    truncated: float | None = None
    truncated_lo: float | None = None
    truncated_hi: float | None = None
    prompt_length: float | None = None
    output_length: float | None = None
    output_length_lo: float | None = None
    output_length_hi: float | None = None
    nll: float | None = None
    nll_lo: float | None = None
    nll_hi: float | None = None
    nll_excess: float | None = None
    nll_excess_lo: float | None = None
    nll_excess_hi: float | None = None
    kl: float | None = None
    kl_lo: float | None = None
    kl_hi: float | None = None
    metrics: str | None = None
    without_eviction: int | None = None
    feeding: str | None = None
    cr_mean: float | None = None
    cr_peak: float | None = None
    cr_end: float | None = None
    slots: int | None = None
    evictions: int | None = None
    violations: int | None = None
    entries_mean: float | None = None
    entries_peak: int | None = None
    head_entries: tuple[tuple[float, ...], ...] | None = None
    kv_bytes: int | None = None
    scorer_bytes: int | None = None
    metadata_bytes: int | None = None
    sliding_bytes: int | None = None
    prefill: str | None = None
    path: str | None = None
    ms_per_step: float | None = None
    tokens_per_s: float | None = None
    peak_memory: int | None = None
    near_ties: int | None = None
    checkpoint: str | None = None
    adapted_lm: str | None = None
    variant: str | None = None
    weights_hash: str
    tokenizer_hash: str | None = None
    random_weights: bool = False
    prompt_hash: str | None = None
    temperature: float
    top_p: float
    top_k: int
    rows: int
    attention: str
    commit: str | None = None
    device: str
    dtype: str
    environment: Environment | None = None
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, cell: Cell, status: Status, reason: str | None = None, *, held_out: bool = False) -> Self:
        """The row of a cell with nothing measured yet."""
        requested = 0.0 if cell.slots is None else max(0.0, 1 - cell.slots / cell.reference_length)
        return cls(
            key=cell.key,
            twin_key=cell.twin_key,
            role=cell.role,
            model=cell.model,
            policy=cell.policy,
            policy_args=",".join(f"{name}={value}" for name, value in cell.policy_args),
            task=cell.task,
            task_version=cell.task_version,
            held_out=held_out,
            gen_length=cell.gen_length,
            cr=requested if cell.cr is None else _as_float(cell.cr),
            cr_requested=cell.cr,
            budget=cell.slots,
            reference_length=cell.reference_length,
            n=cell.problems,
            n_requested=cell.problems_requested,
            data_revision=cell.data_revision,
            chat_template=cell.chat_template,
            samples=cell.samples,
            seed=cell.seed,
            status=status,
            reason=reason,
            checkpoint=cell.checkpoint,
            adapted_lm=cell.adapted_lm,
            weights_hash=cell.weights_hash,
            temperature=cell.temperature,
            top_p=cell.top_p,
            top_k=cell.top_k,
            rows=cell.rows,
            attention=cell.attention,
            device=cell.device,
            dtype=cell.dtype,
        )

    def to_json(self) -> str:
        """One line without its end."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

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
        environment = record.pop("environment", None)
        record["alarms"] = tuple(record.get("alarms") or ())
        if record.get("head_entries") is not None:
            record["head_entries"] = tuple(tuple(layer) for layer in record["head_entries"])
        try:
            return cls(**record, environment=None if environment is None else Environment(**environment))
        except TypeError as error:
            raise KvbenchError(f"A row lacks the fields of schema version {SCHEMA_VERSION}: {error}.") from error


def grade_from(record: Mapping[str, Any]) -> GradeRecord:
    """A grade from a record that may hold more than a grade."""
    names = [field.name for field in dataclasses.fields(GradeRecord)]
    return GradeRecord(**{name: record[name] for name in names if name in record})


def _as_float(ratio: str) -> float:
    numerator, _, denominator = ratio.partition("/")
    return float(numerator) / float(denominator or 1)
