"""The training loop: transformers' Trainer, told what a step is.

Nothing in a step waits for the device: losses stay there and are read back every few steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kvbench.core.errors import KvbenchError
from kvbench.train import attached
from kvbench.train.data import stream
from kvbench.train.portion import Portion
from kvbench.train.resume import Log
from kvbench.train.student import Step

if TYPE_CHECKING:
    from kvbench.train.trainer import Record, Trainer

_FLUSH = 10
"""Steps between reading losses back: reading one waits for the device."""


def run(training: Trainer, log: Log | None, first: int, stop_after: int | None = None) -> bool:
    """Trains from step `first` on; says whether it came to the end.

    Args:
        training: what is trained.
        log: in the first process.
        first: steps that are already done, and saved.
        stop_after: stop before this step.
    """
    Loop(training, log, first, stop_after).train()
    return stop_after is None or stop_after >= training.recipe.steps


class Pace(TrainerCallback):
    """When losses are read back, states saved and evaluations run."""

    def __init__(self, training: Trainer, stop_after: int | None) -> None:
        self._recipe = training.recipe
        self._stop_after = stop_after

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Sets what is due after `state.global_step` steps."""
        done, recipe = state.global_step, self._recipe
        last = done == recipe.steps
        control.should_save = done % recipe.save_every == 0
        control.should_evaluate = done % recipe.eval_every == 0 and not last
        control.should_log = done % _FLUSH == 0 or control.should_save or control.should_evaluate or last
        if last or done == self._stop_after:
            control.should_training_stop = True
        return control


class Loop(transformers.Trainer):
    """transformers' loop over kvbench's steps; its state is in `training`, which outlives it."""

    def __init__(self, training: Trainer, log: Log | None, first: int, stop_after: int | None) -> None:
        arguments = training.processes.arguments
        super().__init__(model=training.student, args=arguments, callbacks=[Pace(training, stop_after)])
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False
        self._training = training
        self._log = log
        self._first = first
        self._pending: list[Record] = []
        self._clock = time.perf_counter()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version != 2:
            raise KvbenchError("FSDP 1 mixes the parameters of LM and scorers; set fsdp_version to 2.")
        if training.recipe.checkpointing:
            attached.compute_twice(training.student)

    # What a step is.

    def get_train_dataloader(self) -> Any:
        """Portions from the first step that is not done."""
        return _Portions(self._training, self._first)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The LM's loss; those of scorers are attached to their layers, with the gradient that is set here."""
        training, recipe, portion = self._training, self._training.recipe, inputs["portion"]
        assert isinstance(portion, Portion)
        step = self.state.global_step
        context = training.context(portion, measure=step % _FLUSH == 0, step=step)
        # Gradients are averaged over processes; portions are parts of one mean.
        processes, layers = training.processes.count, training.loaded.geometry.layers
        context.factor.fill_(recipe.boundary_weight * processes / layers)
        kl, _ = training.forward(portion, context)
        if context.gate is not None:
            self._close_gates(context, training.dropped(portion, step))
        self._note(portion, context, kl.detach())
        # transformers divides by the number of micro-batches, of which ours are parts already.
        scaled: Tensor = kl * (processes * self.current_gradient_accumulation_steps)
        return scaled

    def _close_gates(self, context: Step, wanted: float) -> None:
        """Gates are pushed to close as long as fewer than wanted are closed, over all layers and processes."""
        training = self._training
        closed = torch.stack(list(context.closed.values())).mean()
        # Micro-batches of one process decide by their own share, since the next has not been seen.
        share = training.processes.summed(closed.clone()) * training.recipe.accumulation
        weight = training.recipe.gate_weight * training.processes.count / len(context.closed)
        context.factor.copy_((share < wanted) * weight)

    def _note(self, portion: Portion, context: Step, kl: Tensor) -> None:
        """Adds a portion to the record of its step."""
        training, step, batch = self._training, self.state.global_step, portion.batch
        if not self._pending or self._pending[-1]["step"] != step:
            recipe = training.recipe
            self._pending.append(
                {
                    "step": step,
                    "sums": {},
                    "lr": recipe.lm_lr * recipe.lm_factor(step),
                    "scorer_lr": recipe.scorer_lr * recipe.lr_factor(step),
                    "cr": batch.budget.cr,
                    "budget": batch.budget.slots,
                    "level": batch.level,
                    "rows": portion.rows,
                    "tokens": portion.tokens,
                }
            )
        record = self._pending[-1]
        sums = {"kl": kl}
        per_layer = {"recall": context.recall, "closed": context.closed}
        if context.gate is None:
            per_layer["boundary"] = context.boundary
        for name, values in per_layer.items():
            if values:
                sums[name] = torch.stack(list(values.values())).mean()
        for name, value in sums.items():
            before = record["sums"].get(name)
            record["sums"][name] = value if before is None else before + value

    # How parameters move.

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW over LM and scorers, in groups of their own."""
        recipe, named = self._training.recipe, list((model or self._training.student).named_parameters())
        lm = [p for name, p in named if p.requires_grad and not attached.is_scorer(name)]
        scorers = [p for name, p in named if attached.is_scorer(name)]
        groups = [(lm, recipe.lm_lr), (scorers, recipe.scorer_lr)]
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters, "lr": lr} for parameters, lr in groups if parameters],
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=self._training.device.type == "cuda",
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """The recipe's schedules, from the first step that is not done."""
        training, recipe = self._training, self._training.recipe
        factors: list[Callable[[int], float]] = [] if recipe.freeze_lm else [recipe.lm_factor]
        factors += [recipe.lr_factor] if training.has_scorers else []
        rates = [] if recipe.freeze_lm else [recipe.lm_lr]
        rates += [recipe.scorer_lr] if training.has_scorers else []
        inner = optimizer or self._optimizer()
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["initial_lr"] = rate
        self.lr_scheduler = LambdaLR(inner, factors, last_epoch=self._first - 1)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clips LM and scorers apart; returns the norm of the first of them that is trained."""
        recipe = self._training.recipe
        names = ([] if recipe.freeze_lm else ["lm_norm"]) + (["scorer_norm"] if self._training.has_scorers else [])
        norms = []
        for name, group in zip(names, self._optimizer().param_groups, strict=True):
            norm = nn.utils.clip_grad_norm_(group["params"], recipe.clip)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            # Every process has the same norm; sums are over processes.
            self._pending[-1]["sums"][name] = norms[-1].detach() / self._training.processes.count
        return norms[0]

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted."""
        return 0

    # Where it goes on, and what it leaves.

    def _init_training_state(self, *arguments: Any, **more: Any) -> tuple[int, int]:
        start = super()._init_training_state(*arguments, **more)
        self.state.global_step = self._first
        return start

    def _prepare_for_training(self, *arguments: Any, **more: Any) -> tuple[nn.Module, Any]:
        model, portions = super()._prepare_for_training(*arguments, **more)  # type: ignore[no-untyped-call]  # theirs
        self._training.wrapped = model
        if self._first:
            self._training.load(self._optimizer())
        return model, portions

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._training.save(self.state.global_step, self._optimizer())
        self._clock = time.perf_counter()

    def _optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's."""
        outer = self.optimizer
        assert outer is not None
        return outer.optimizer if isinstance(outer, AcceleratedOptimizer) else outer

    # What it tells.

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measures on held-back rows."""
        record = self._training.evaluate()
        self._training.record_evaluation(self.state.global_step - 1, record, self._log)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, record)
        self._clock = time.perf_counter()
        return {f"eval_{name}": value for name, value in record.items() if isinstance(value, float)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Reads losses back, logs and empties what is pending."""
        last = self._flush()
        super().log({**logs, **{name: value for name, value in last.items() if isinstance(value, float)}}, start_time)

    def _flush(self) -> Record:
        pending, self._pending = self._pending, []
        if not pending:
            return {}
        named = {(place, name): value for place, record in enumerate(pending) for name, value in record["sums"].items()}
        sums = self._training.processes.sums({f"{place} {name}": value for (place, name), value in named.items()})
        records = []
        for place, record in enumerate(pending):
            found = {name: sums[f"{place} {name}"] for name in record.pop("sums")}
            records.append({"step": record.pop("step"), **_in_order(found), **record})
        now = time.perf_counter()
        speed = round(sum(record["tokens"] for record in records) / (now - self._clock))
        self._clock = now
        for record in records:
            record["tokens_per_s"] = speed
            if not math.isfinite(record["kl"] + (record.get("boundary") or 0.0)):
                raise KvbenchError(
                    f"The loss at step {record['step']} is not a finite number; try lower learning rates."
                )
            if self._log is not None:
                self._log.write(record)
                self._training.report.step(record)
        return records[-1]


class _Portions:
    """What transformers takes for a data loader."""

    def __init__(self, training: Trainer, first: int) -> None:
        self._training = training
        self._first = first
        self.dataset = training.steps()

    def __len__(self) -> int:
        return self._training.recipe.steps * self._training.recipe.accumulation

    def __iter__(self) -> Iterator[dict[str, Portion]]:
        for portions in stream(self.dataset, self._first, self._training.workers):
            yield from ({"portion": portion} for portion in portions)


def _in_order(found: Record) -> Record:
    names = ("kl", "boundary", "closed", "lm_norm", "scorer_norm", "recall")
    return {name: found[name] for name in names if name in found}
