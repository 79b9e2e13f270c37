"""A training: a dense teacher, a student under the mask of its own scores, one checkpoint.

The LM learns from the teacher's distribution. Scorers that rank learn from the boundary loss only: the mask is hard
and their inputs are detached. Gates learn from both the distribution and their share. LM and scorers are clipped apart
and have their own learning rates. The loop is transformers' (`loop.py`); here is what it trains and what comes of it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import GatedPolicy, LearnedPolicy, kept_share
from kvbench.data.lock import LOCK
from kvbench.models.checkpoint import ADAPTED_LM, MANIFEST, SCORER, Checkpoint, make_scorers
from kvbench.models.source import LoadedModel, sliding_windows
from kvbench.train import attached, relaxed, whole
from kvbench.train.budgets import check_budgets
from kvbench.train.data import RowSource
from kvbench.train.distill import student_loss
from kvbench.train.portion import Draw, Portion, Steps, number
from kvbench.train.processes import Processes
from kvbench.train.recipe import Recipe
from kvbench.train.resume import LOG, STATE, Log, damaged, open_folder, read_state, saved_step, write_state
from kvbench.train.student import Objective, Step
from kvbench.train.target import TargetKind
from kvbench.train.teacher import Teacher

Record = dict[str, Any]

_BISECTIONS = 16
_FURTHEST_SHIFT = 32.0


class Report(Protocol):
    """What watches a training."""

    def step(self, record: Record) -> None:
        """Called with the log record of each step."""

    def evaluation(self, record: Record) -> None:
        """Called with the log record of each evaluation."""


class Silent:
    """A report that says nothing."""

    def step(self, record: Record) -> None:
        """Nothing."""

    def evaluation(self, record: Record) -> None:
        """Nothing."""


class Trainer:
    """One training of one policy on one model, in this process or together with others that were launched like it.

    Args:
        loaded: the dense model in fp32: teacher, and start of the student. Left as it was.
        policy: with the hyper-parameters to train.
        recipe: settings.
        rows: what is trained on.
        out: folder of the checkpoint, the log and the state to go on from.
        device: where it is trained; where it is loaded when None.
        workers: processes that make rows; 0 makes them in this one.
        resume: go on with what `out` holds.
        report: called with every log record, in the first process.
        teacher_cache: folder for what the teacher says; None to keep nothing.
        variant: what was changed of the recipe, for tables.

    Raises:
        KvbenchError: a level is too short for a budget, the model cannot be trained, or `out` is not free.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: LearnedPolicy,
        recipe: Recipe,
        rows: RowSource,
        out: Path,
        *,
        device: torch.device | None = None,
        workers: int = 0,
        resume: bool = True,
        report: Report | None = None,
        teacher_cache: Path | None = None,
        variant: str = "",
    ) -> None:
        if any(window is not None for window in sliding_windows(loaded.model.config)):
            raise KvbenchError(
                f"Model '{loaded.name}' has sliding-window layers; training works on models whose layers all have "
                "a full cache."
            )
        self.loaded = loaded
        self.policy = policy
        self.recipe = recipe
        self.variant = variant
        self.rows = rows
        self.seed = rows.seed
        self.out = out
        self.workers = workers
        self.report: Report = report or Silent()
        if recipe.freeze_lm and policy.scorer(loaded.geometry) is None:
            raise KvbenchError(f"Policy '{policy.name}' has no scorer, so with a frozen LM there is nothing to train.")
        check_budgets(policy, loaded, rows, recipe)
        self.processes = Processes(device or loaded.device, recipe, out, self.seed)
        self.device = self.processes.device
        with self.processes.first_alone():
            open_folder(out, self._configuration(), resume=resume, leftovers=(MANIFEST, SCORER, ADAPTED_LM, LOCK))

        self.draw = Draw(
            policy, loaded.geometry, recipe.boundary_queries, recipe.boundary_future, recipe.boundary_slots
        )
        self.autocast = recipe.precision == "bf16" or (recipe.precision == "auto" and self.device.type == "cuda")
        self.teacher = Teacher(
            loaded,
            recipe.top,
            self.device,
            autocast=self.autocast,
            halved=recipe.teacher_weights == "bf16",
            cache=teacher_cache,
        )
        self.student = copy.deepcopy(loaded.model).requires_grad_(not recipe.freeze_lm)
        attached.without_dropout(self.student.modules())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            scorers = make_scorers(policy, loaded.geometry)
        self._prefixes = attached.attach(loaded, self.student, None if scorers is None else scorers.to(loaded.device))
        self.student.set_attn_implementation(attached.NAME)
        # Tied ones once, before anything wraps them, and in an order that all processes share.
        self._names = tuple(name for name, _ in self.student.named_parameters())
        self.wrapped: nn.Module = self.student
        """The student as the loop has wrapped it for several processes; itself in a single one."""
        self._objective = Objective(
            TargetKind(recipe.normaliser, recipe.group, recipe.count, recipe.lookahead, recipe.target_power),
            recipe.margin,
            recipe.balance,
        )

    @property
    def finished(self) -> bool:
        """Whether the folder already holds the checkpoint of this very training."""
        return (self.out / MANIFEST).exists()

    @property
    def has_scorers(self) -> bool:
        """Whether there is more to train than the LM."""
        return bool(self._prefixes)

    def train(self, stop_after: int | None = None) -> Checkpoint | None:
        """Runs to the end and returns the checkpoint.

        Args:
            stop_after: stop before this step without a checkpoint, as a kill would; None is returned.
        """
        if self.finished:
            return Checkpoint.load(self.out)
        from kvbench.train.loop import run

        first = saved_step(self.out).step
        log = Log(self.out / LOG, first) if self.processes.is_first else None
        try:
            if not run(self, log, first, stop_after):
                return None
            if isinstance(self.policy, GatedPolicy):
                self.policy = self._calibrated(self.policy)
            summary = self.evaluate()
            self.record_evaluation(self.recipe.steps - 1, summary, log)
        finally:
            if log is not None:
                log.close()
        weights = self.weights()
        if self.processes.is_first:
            self._checkpoint(summary, weights).save(self.out)
            (self.out / STATE).unlink(missing_ok=True)
        self.processes.wait()
        return Checkpoint.load(self.out)

    def steps(self) -> Steps:
        """What this process trains on, by step."""
        return Steps(self.rows, self.draw, self.processes.rank, self.processes.count)

    def precompute(self) -> int:
        """Asks the teacher about every row of the training and of its evaluations, for its cache; returns the steps done."""
        steps = self.steps()
        for step in range(len(steps)):
            for portion in steps[step]:
                self.teacher(portion)
        for level, cr in self._cells():
            self.teacher(self._held_back(level, cr))
        self.processes.wait()
        return len(steps)

    def forward(self, portion: Portion, step: Step) -> tuple[Tensor, Tensor]:
        """This portion's part of the mean KL and of the share of positions with the same best token; scalars."""
        wanted = self.teacher(portion)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            kl, same = student_loss(
                self.wrapped,
                self.student,
                wanted,
                portion.batch.real().to(self.device, non_blocking=True),
                input_ids=portion.batch.ids.to(self.device, non_blocking=True),
                position_ids=None if step.documents is None else step.documents.positions,
                kvbench_step=step,
            )
        return kl / max(1, portion.positions), same / max(1, portion.positions)

    def context(self, portion: Portion, *, measure: bool, step: int | None = None) -> Step:
        """What the student's layers are told about a portion of a training step, or of an evaluation."""
        gate = None
        if isinstance(self.policy, GatedPolicy):
            dropped = self.dropped(portion, step)
            stream = number(f"{self.seed}/{step}/gates") if step is not None else 0
            names = portion.names.to(self.device)
            gate = relaxed.GateStep(self.policy.offset(1 - dropped), step is not None, stream, names, portion.leaving)
        return Step(
            split=portion.split,
            lengths=portion.batch.sequences().to(self.device),
            sample=portion.sample.to(self.device),
            pairs=portion.pairs.to(self.device),
            objective=self._objective,
            documents=None if portion.documents is None else portion.documents.to(self.device),
            gate=gate,
            factor=torch.zeros((), device=self.device),
            measure=measure,
        )

    def dropped(self, portion: Portion, step: int | None) -> float:
        """Share of tokens that gates are to drop: in the end (None), or at a step of the ramp."""
        share = kept_share(portion.split, portion.batch.budget.reference_length)
        progress = 1.0 if step is None else (step + 1) / self.recipe.steps
        return relaxed.target_share(share, progress, self.recipe.ramp)

    @torch.no_grad()
    def evaluate(self) -> Record:
        """Measurements on held-back rows: at each ratio over all levels, and their mean.

        `kl` and `top1` compare student and teacher at each token; `recall`, `mass` and `closed` are those of
        `student.Step`, means over the layers. A value that a policy does not have is None.
        """
        cells: dict[str, list[Record]] = {}
        for level, cr in self._cells():
            cells.setdefault(str(cr), []).append(self._measure(self._held_back(level, cr)))
        by_cr = {cr: _mean_record(records) for cr, records in cells.items()}
        return {**_mean_record(list(by_cr.values())), "by_cr": by_cr}

    def record_evaluation(self, step: int, record: Record, log: Log | None) -> None:
        """Logs and reports an evaluation after step `step`."""
        if log is not None:
            log.write({"step": step, "evaluation": record})
            self.report.evaluation({"step": step, **record})

    def weights(self) -> dict[str, Tensor]:
        """All parameters by name, whole in the first process; to be called in all of them."""
        return whole.weights(self.wrapped, self._names, self.processes.count)

    def save(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Writes everything that step `step` needs, from the first process; to be called in all of them."""
        tensors = whole.state(self.wrapped, self._names, optimizer, self.processes.count)
        if self.processes.is_first:
            write_state(self.out, step, tensors)
        self.processes.wait()

    def load(self, optimizer: torch.optim.Optimizer) -> None:
        """Restores what `save` wrote.

        Raises:
            KvbenchError: the file is damaged, or of another model.
        """
        tensors = read_state(self.out)
        with damaged(self.out):
            whole.restore(self.wrapped, self._names, optimizer, tensors)

    def _cells(self) -> list[tuple[int, Fraction]]:
        return [(level, cr) for level in sorted(self.recipe.levels) for cr in sorted(set(self.rows.crs))]

    def _held_back(self, level: int, cr: Fraction) -> Portion:
        """This process's portion of an evaluation."""
        batch = self.rows.held_back(level, cr, self.recipe.eval_rows)
        rank = self.processes.rank
        stream = f"{self.seed}/held back/{level}"
        return self.draw.portions(batch, stream, self.processes.count, range(rank, rank + 1))[0]

    @torch.no_grad()
    def _measure(self, portion: Portion) -> Record:
        context = self.context(portion, measure=True)
        self.wrapped.eval()
        kl, same = self.forward(portion, context)
        found = {"kl": kl, "top1": same}
        # A level too short for a sampled query has nothing to say about sets.
        if portion.sample.total:
            found |= {
                name: mean_of(values)
                for name, values in (
                    ("boundary", context.boundary),
                    ("recall", context.recall),
                    ("mass", context.mass),
                )
                if values
            }
        if context.closed:
            found["closed"] = mean_of(context.closed)
        sums = self.processes.sums(found)
        names = ["kl", "top1", "boundary", "recall", "mass"]
        return {name: sums.get(name) for name in (*names, *(["closed"] if context.closed else []))}

    def _calibrated(self, policy: GatedPolicy) -> GatedPolicy:
        """The policy with the shift, for each ratio, at which the gates keep the budget's share of held-back tokens."""
        shifts = []
        for cr in sorted(set(self.rows.crs)):
            portions = [self._held_back(level, cr) for level in sorted(self.recipe.levels)]
            shares = [kept_share(portion.split, portion.batch.budget.reference_length) for portion in portions]
            share = sum(shares) / len(shares)
            low, high = -_FURTHEST_SHIFT, _FURTHEST_SHIFT
            for _ in range(_BISECTIONS):
                self.policy = policy.calibrated([(share, (low + high) / 2)])
                closed = [self._measure(portion)["closed"] for portion in portions]
                if sum(closed) / len(closed) < 1 - share:
                    low = (low + high) / 2
                else:
                    high = (low + high) / 2
            shifts.append((share, (low + high) / 2))
        return policy.calibrated(shifts)

    def _configuration(self) -> Record:
        return {
            "policy": self.policy.name,
            "parameters": dataclasses.asdict(self.policy),
            "model": self.loaded.name,
            "weights_hash": self.loaded.weights_hash,
            "tasks": self.rows.described(),
            "recipe": self.recipe.as_json(),
            "seed": self.seed,
        }

    def _checkpoint(self, summary: Record, weights: Mapping[str, Tensor]) -> Checkpoint:
        lengths = {str(level): self.rows.reference_length(level) for level in sorted(self.recipe.levels)}
        configuration = self._configuration()
        lm, scorers = attached.split_apart(weights, self._prefixes)
        frozen = self.recipe.freeze_lm
        return Checkpoint(
            policy_name=self.policy.name,
            parameters=configuration["parameters"],
            base_model=self.loaded.name,
            weights_hash=self.loaded.weights_hash,
            geometry=self.loaded.geometry,
            trained_budgets={"crs": list(self.recipe.crs), "reference_lengths": lengths},
            recipe={**configuration["recipe"], "tasks": configuration["tasks"], "seed": self.seed},
            training={"steps": self.recipe.steps, **summary},
            variant=self.variant,
            scorer_weights=scorers or None,
            lm_weights=None if frozen else {name: value.detach().bfloat16() for name, value in lm.items()},
        )


def mean_of(values: Mapping[int, Tensor]) -> Tensor:
    """Mean over layers, a scalar."""
    return torch.stack(list(values.values())).mean()


def _mean_record(records: Sequence[Record]) -> Record:
    """Mean of each value over the records that have it."""
    return {name: _mean([record[name] for record in records if record[name] is not None]) for name in records[0]}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
