"""The training loop: a dense teacher, a student under the mask of its own scores, two losses, one checkpoint.

The LM learns from the teacher's distribution only and the scorers from the boundary loss only: the mask is
hard and the scorers' inputs are detached, so the two share no gradient. They are clipped apart and have their
own learning rates.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvbench.core.budget import Budget
from kvbench.core.errors import KvbenchError
from kvbench.core.policy import LearnedPolicy
from kvbench.core.task import TracedTask
from kvbench.models.checkpoint import ADAPTED_LM, MANIFEST, SCORER, Checkpoint, make_scorers
from kvbench.models.source import LoadedModel, sliding_windows
from kvbench.train import student
from kvbench.train.data import Batch, Problems, stream
from kvbench.train.losses import Sample, distillation, sample_queries
from kvbench.train.recipe import Recipe
from kvbench.train.resume import LOG, STATE, Log, load_state, open_folder, save_state

_FLUSH = 10
"""Steps between reading losses back: reading one waits for the device."""

Record = dict[str, Any]


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
    """One training of one policy on one model.

    Args:
        loaded: the dense model in fp32: teacher, and start of the student. Left as it was.
        policy: with the hyper-parameters to train.
        recipe: settings.
        tasks: sources of problems.
        out: folder of the checkpoint, the log and the state to go on from.
        seed: decides rows, budgets, queries, and the scorers' first weights.
        workers: processes that make rows; 0 makes them in this one.
        resume: go on with what `out` holds.
        report: called with every log record.

    Raises:
        KvbenchError: a level is too short for a budget, the model cannot be trained, or `out` is not free.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: LearnedPolicy,
        recipe: Recipe,
        tasks: Sequence[TracedTask],
        out: Path,
        *,
        seed: int = 0,
        workers: int = 0,
        resume: bool = True,
        report: Report | None = None,
    ) -> None:
        if any(window is not None for window in sliding_windows(loaded.model.config)):
            raise KvbenchError(
                f"Model '{loaded.name}' has sliding-window layers; training works on models whose layers all have "
                "a full cache."
            )
        self.loaded = loaded
        self.policy = policy
        self.recipe = recipe
        self.problems = Problems(tasks, loaded.tokenizer, recipe, seed)
        self.out = out
        self.seed = seed
        self.workers = workers
        self.report: Report = report or Silent()
        self._check_budgets()
        open_folder(out, self._configuration(), resume=resume, leftovers=(MANIFEST, SCORER, ADAPTED_LM))

        self.device = loaded.device
        self.student = _copy_of(loaded.model).requires_grad_(True)
        self.student.set_attn_implementation(student.NAME)
        self.teacher = _copy_of(loaded.model).requires_grad_(False)
        self.teacher.set_attn_implementation("sdpa")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            scorers = make_scorers(policy, loaded.geometry)
        self.scorers = None if scorers is None else scorers.to(self.device)
        self.optimizer = self._optimizer()

    @property
    def finished(self) -> bool:
        """Whether the folder already holds the checkpoint of this very training."""
        return (self.out / MANIFEST).exists()

    def train(self, stop_after: int | None = None) -> Checkpoint | None:
        """Runs to the end and returns the checkpoint.

        Args:
            stop_after: stop before this step without a checkpoint, as a kill would; None is returned.
        """
        if self.finished:
            return Checkpoint.load(self.out)
        first = load_state(self.out, self._modules(), self.optimizer).step
        log = Log(self.out / LOG, first)
        try:
            pending: list[Record] = []
            clock = time.perf_counter()
            for step, batch in enumerate(stream(self.problems, first, self.workers), first):
                if step == stop_after:
                    return None
                pending.append(self._step(step, batch))
                done = step + 1
                saving = done % self.recipe.save_every == 0
                evaluating = done % self.recipe.eval_every == 0 and done < self.recipe.steps
                if len(pending) == _FLUSH or saving or evaluating or done == self.recipe.steps:
                    clock = self._flush(pending, clock, log)
                if evaluating:
                    self._evaluate(step, log)
                    clock = time.perf_counter()
                if saving:
                    save_state(self.out, done, self._modules(), self.optimizer)
                    clock = time.perf_counter()
            summary = self._evaluate(self.recipe.steps - 1, log)
        finally:
            log.close()
        checkpoint = self._checkpoint(summary).save(self.out)
        (self.out / STATE).unlink(missing_ok=True)
        return checkpoint

    @torch.no_grad()
    def evaluate(self) -> Record:
        """Measurements on held-back problems: at each ratio over all levels, and their mean.

        `kl` and `top1` compare student and teacher at each token; `recall` and `mass` are those of
        `student.Step`, means over the layers. A value that a policy does not have is None.
        """
        crs = sorted(set(self.problems.crs))
        cells: dict[Fraction, list[Record]] = {cr: [] for cr in crs}
        for level in sorted(self.recipe.levels):
            for cr in crs:
                cells[cr].append(self._measure(self.problems.held_back(level, cr, self.recipe.eval_rows)))
        by_cr = {str(cr): _mean_record(records) for cr, records in cells.items()}
        return {**_mean_record(list(by_cr.values())), "by_cr": by_cr}

    def _step(self, step: int, batch: Batch) -> Record:
        """One optimiser step. Losses in the record are tensors on the device until they are flushed."""
        recipe = self.recipe
        factor = recipe.lr_factor(step)
        for group, lr in zip(self.optimizer.param_groups, (recipe.lm_lr, recipe.scorer_lr), strict=False):
            group["lr"] = lr * factor
        context = self._context(batch, f"{self.seed}/{step}", measure=step % _FLUSH == 0)
        kl, _ = self._forward(batch, context)
        boundary = _mean(context.boundary, self.device)
        (kl + recipe.boundary_weight * boundary).backward()  # type: ignore[no-untyped-call]  # torch's own
        norms = [nn.utils.clip_grad_norm_(group["params"], recipe.clip) for group in self.optimizer.param_groups]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        record: Record = {"step": step, "kl": kl.detach(), "boundary": boundary.detach(), "lm_norm": norms[0]}
        if self.scorers is not None:
            record["scorer_norm"] = norms[1]
        if context.recall:
            record["recall"] = _mean(context.recall, self.device)
        record |= {"lr": recipe.lm_lr * factor, "cr": batch.budget.cr, "budget": batch.budget.slots}
        return record | {"level": batch.level, "rows": batch.ids.shape[0], "tokens": int(batch.lengths.sum())}

    def _forward(self, batch: Batch, context: student.Step) -> tuple[Tensor, Tensor]:
        """KL, a scalar, and share of tokens at which student and teacher name the same token, a scalar."""
        ids = batch.ids.to(self.device, non_blocking=True)
        real = batch.real().to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            with torch.no_grad():
                wanted = self.teacher(input_ids=ids, use_cache=False).logits
            logits = self.student(input_ids=ids, use_cache=False, kvbench_step=context).logits
        kl = distillation(logits, wanted, real, self.recipe.top)
        same = (logits.detach().argmax(-1) == wanted.argmax(-1)) & real
        return kl, same.sum() / real.sum()

    def _context(self, batch: Batch, stream_name: str, *, measure: bool) -> student.Step:
        split = self.policy.checked_split(batch.budget.slots, self.loaded.geometry)
        pairs_long = self._pairs_long(stream_name, split.long)
        generator = _generator(stream_name)

        def sample(long: int) -> Sample:
            # The first query at which a layer with so many long-range slots holds more than it may keep.
            first = split.sinks + split.window + max(0, long)
            count = self.recipe.boundary_queries
            return sample_queries(batch.lengths, first, self.recipe.boundary_future, count, generator).to(self.device)

        return student.Step(
            split=split,
            lengths=batch.lengths.to(self.device),
            sample=sample(split.long),
            pairs=sample(pairs_long),
            pairs_long=pairs_long,
            scorers=self.scorers,
            sparse_normaliser=self.recipe.normaliser == "sparse",
            power=self.recipe.target_power,
            margin=self.recipe.margin,
            balance=self.recipe.balance,
            measure=measure,
        )

    def _pairs_long(self, stream_name: str, long: int) -> int:
        """Long-range slots of the boundary loss: the step's, or fewer, drawn log-uniformly."""
        least = self.recipe.boundary_slots
        if not 0 < least < long:
            return long
        return round(least * (long / least) ** random.Random(f"{stream_name}/slots").random())

    def _measure(self, batch: Batch) -> Record:
        context = self._context(batch, f"{self.seed}/held back/{batch.level}", measure=True)
        kl, same = self._forward(batch, context)
        record: Record = {
            "kl": kl.item(),
            "top1": same.item(),
            "boundary": None,
            "recall": None,
            "mass": None,
        }
        # A level too short for a sampled query has nothing to say about sets.
        if bool(context.sample.valid.any()):
            measured = {"boundary": context.boundary, "recall": context.recall, "mass": context.mass}
            record |= {name: _mean(values, self.device).item() for name, values in measured.items() if values}
        return record

    def _evaluate(self, step: int, log: Log) -> Record:
        record = self.evaluate()
        log.write({"step": step, "evaluation": record})
        self.report.evaluation({"step": step, **record})
        return record

    def _flush(self, pending: list[Record], clock: float, log: Log) -> float:
        """Reads losses back, logs and empties `pending`; returns the time."""
        records = [
            {name: value.item() if isinstance(value, Tensor) else value for name, value in record.items()}
            for record in pending
        ]
        now = time.perf_counter()
        speed = sum(record["tokens"] for record in records) / (now - clock)
        pending.clear()
        for record in records:
            record["tokens_per_s"] = round(speed)
            if not math.isfinite(record["kl"] + record["boundary"]):
                raise KvbenchError(
                    f"The loss at step {record['step']} is not a finite number; try lower learning rates."
                )
            log.write(record)
            self.report.step(record)
        return now

    def _check_budgets(self) -> None:
        """Every ratio must leave the policy enough slots at every level."""
        geometry = self.loaded.geometry
        smallest = self.policy.smallest_budget(geometry)
        for level in sorted(self.recipe.levels):
            reference = self.problems.reference_length(level)
            if reference > self.loaded.max_positions:
                raise KvbenchError(
                    f"Rows of level {level} have up to {reference} tokens, but model '{self.loaded.name}' "
                    f"supports {self.loaded.max_positions}; leave the level out."
                )
            for cr, text in zip(self.problems.crs, self.recipe.crs, strict=True):
                slots = Budget.from_cr(cr, reference).slots
                if slots < smallest:
                    raise KvbenchError(
                        f"Rows of level {level} are too short to train ratio {text}: they leave {slots} "
                        f"slots, but policy '{self.policy.name}' needs at least {smallest}."
                    )

    def _configuration(self) -> Record:
        return {
            "policy": self.policy.name,
            "parameters": dataclasses.asdict(self.policy),
            "model": self.loaded.name,
            "weights_hash": self.loaded.weights_hash,
            "tasks": [f"{task.name}@{task.version}" for task in self.problems.tasks],
            "recipe": self.recipe.as_json(),
            "seed": self.seed,
        }

    def _modules(self) -> Mapping[str, nn.Module]:
        modules: dict[str, nn.Module] = {"lm": self.student}
        return modules if self.scorers is None else {**modules, "scorers": self.scorers}

    def _optimizer(self) -> torch.optim.AdamW:
        recipe = self.recipe
        groups: list[dict[str, Any]] = [{"params": list(self.student.parameters()), "lr": recipe.lm_lr}]
        if self.scorers is not None:
            groups.append({"params": list(self.scorers.parameters()), "lr": recipe.scorer_lr})
        fused = self.device.type == "cuda"
        return torch.optim.AdamW(groups, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=fused)

    def _checkpoint(self, summary: Record) -> Checkpoint:
        lengths = {str(level): self.problems.reference_length(level) for level in sorted(self.recipe.levels)}
        configuration = self._configuration()
        return Checkpoint(
            policy_name=self.policy.name,
            parameters=configuration["parameters"],
            base_model=self.loaded.name,
            weights_hash=self.loaded.weights_hash,
            geometry=self.loaded.geometry,
            trained_budgets={"crs": list(self.recipe.crs), "reference_lengths": lengths},
            recipe={**configuration["recipe"], "tasks": configuration["tasks"], "seed": self.seed},
            training={"steps": self.recipe.steps, **summary},
            scorer_weights=None if self.scorers is None else dict(self.scorers.state_dict()),
            lm_weights={name: value.detach().bfloat16() for name, value in self.student.named_parameters()},
        )


def _copy_of(model: Any) -> Any:
    """A copy without dropout."""
    return copy.deepcopy(model).eval()


def _generator(name: str) -> torch.Generator:
    """A stream of random numbers that follows from its name."""
    return torch.Generator().manual_seed(random.Random(name).getrandbits(63))


def _mean(values: Mapping[int, Tensor], device: torch.device) -> Tensor:
    """Mean over layers, a scalar; 0 without any."""
    return torch.stack(list(values.values())).mean() if values else torch.zeros((), device=device)


def _mean_record(records: Sequence[Record]) -> Record:
    """Mean of each value over the records that have it."""
    return {name: _mean_of([record[name] for record in records if record[name] is not None]) for name in records[0]}


def _mean_of(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


__all__ = ["Record", "Report", "Silent", "Trainer"]
