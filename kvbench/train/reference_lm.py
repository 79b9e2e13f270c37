"""Trains the embedded reference model from scratch: `python -m kvbench.train.reference_lm --recipe FILE --out DIR`."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvbench.core.errors import KvbenchError
from kvbench.entries import load_target
from kvbench.train.reference_batches import IGNORED, Batch, batch_loader
from kvbench.train.reference_card import SUMMARY, write_card
from kvbench.train.reference_evaluation import evaluate
from kvbench.train.reference_recipe import OptimizerRecipe, ReferenceRecipe, Stage
from kvbench.train.resume import CONFIGURATION, LOG, STATE, Log, load_state, open_folder, save_state

MOST_PARAMETERS = 3_000_000
MOST_BYTES = 6_000_000
WEIGHTS = "model.safetensors"


def build_model(recipe: ReferenceRecipe) -> Qwen3ForCausalLM:
    """Return the untrained model, initialised from the recipe's seed."""
    fields: dict[str, Any] = dict(recipe.model)
    theta = fields.pop("rope_theta")
    config = Qwen3Config(
        **fields,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("sdpa")
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > MOST_PARAMETERS:
        raise KvbenchError(f"The recipe's model has {parameters} parameters; at most {MOST_PARAMETERS} are allowed.")
    return model


def build_optimizer(model: Qwen3ForCausalLM, recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """Return AdamW; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = model.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=fused)


def rate_share(step: int, progress: float, recipe: OptimizerRecipe) -> float:
    """Return the share of the full learning rate at a step and a progress in 0..1."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    if progress <= recipe.constant_share:
        return warm
    done = min(1.0, (progress - recipe.constant_share) / (1 - recipe.constant_share))
    return warm * (recipe.final_share + (1 - recipe.final_share) * 0.5 * (1 + math.cos(math.pi * done)))


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the completion tokens."""
    # Rows are right-padded and attention is causal: no mask is needed, so attention stays on its fastest path.
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=batch.ids.is_cuda):
        logits = model(input_ids=batch.ids[:, :-1].long(), use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch.labels().flatten(), ignore_index=IGNORED)


@dataclass
class Progress:
    """How far a training is: by steps and, if it has a time limit, by the clock, whichever is further.

    A limited training therefore still ends with its learning rate annealed.

    Attributes:
        step: steps done.
        earlier: seconds spent before the last resumption.
        limit: seconds allowed altogether; None for no limit.
    """

    steps: int
    limit: float | None
    step: int = 0
    earlier: float = 0.0
    started: float = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds spent so far."""
        return self.earlier + time.monotonic() - self.started

    @property
    def by_time(self) -> float:
        """Share of the allowed time that is spent."""
        return self.elapsed / self.limit if self.limit else 0.0

    @property
    def share(self) -> float:
        """Share of the training that is done, in 0..1."""
        return min(1.0, max(self.step / self.steps, self.by_time))


class ReferenceTraining:
    """One training in one output folder; picks up its state there if it was interrupted.

    Args:
        recipe: what determines the training.
        out: the folder.
        device: where it runs.
        minutes: time limit.
        start: folder with the stored model to begin from; from scratch if None.
        resume: go on with what `out` holds; otherwise start afresh.

    Raises:
        KvbenchError: `out` holds something else or is damaged, or `start` has no weights that fit.
    """

    def __init__(
        self,
        recipe: ReferenceRecipe,
        out: Path,
        device: torch.device,
        minutes: float | None = None,
        start: Path | None = None,
        *,
        resume: bool = True,
    ) -> None:
        self.recipe = recipe
        self.out = out
        self.device = device
        self.start = start
        self.model = build_model(recipe)
        started_from = _begin_from(self.model, start) if start is not None else None
        configuration = {"recipe": recipe.as_dict(), "start": started_from}
        open_folder(out, configuration, resume=resume)
        self.model.to(device)  # type: ignore[arg-type]  # transformers wraps and thereby mistypes it
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.progress = Progress(recipe.steps, minutes * 60 if minutes else None)
        resumed = load_state(out, {"model": self.model}, self.optimizer)
        self.progress.step = resumed.step
        self.progress.earlier = resumed.counters.get("seconds", 0.0)
        self.tokens = int(resumed.counters.get("tokens", 0))

    def run(
        self,
        workers: int,
        log_every: int = 100,
        save_every: int = 1000,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        """Train to the end.

        Args:
            workers: processes that make batches; 0 makes them in this one.
            log_every: steps between two lines on the screen and in the log.
            save_every: steps between two saved states.
            after_step: called with the number of steps done after each.
        """
        if self.progress.step:
            print(f"going on at step {self.progress.step}", flush=True)
        loader = batch_loader(self.recipe, self.progress.step, workers, pin=self.device.type == "cuda")
        log = Log(self.out / LOG, self.progress.step + 1)
        try:
            self._run(loader, log, log_every, save_every, after_step)
        finally:
            log.close()
        self._save_state()

    def _run(
        self,
        loader: Iterable[Batch],
        log: Log,
        log_every: int,
        save_every: int,
        after_step: Callable[[int], None] | None,
    ) -> None:
        self.model.train()
        self.progress.started = time.monotonic()
        since, tokens_since, losses = time.monotonic(), 0, torch.zeros((), device=self.device)
        steps_since = 0
        for batch in loader:
            progress = self.progress.share
            if progress >= 1:
                break
            rate, loss, norm = self._step(batch.to(self.device), progress)
            losses += loss
            steps_since += 1
            tokens_since += batch.ids.numel()
            self.tokens += batch.ids.numel()
            self.progress.step += 1
            step = self.progress.step
            if step % log_every == 0 or step == self.recipe.steps:
                mean = float(losses) / steps_since
                now = time.monotonic()
                values = {
                    "step": step,
                    "loss": round(mean, 6),
                    "grad_norm": round(float(norm), 4),
                    "rate": rate,
                    "progress": round(progress, 4),
                    "seconds": round(self.progress.elapsed, 1),
                    "tokens_per_s": round(tokens_since / (now - since)),
                }
                log.write(values)
                print("  ".join(f"{name} {value:.6g}" for name, value in values.items()), flush=True)
                if not math.isfinite(mean):
                    raise KvbenchError(f"The loss is {mean} at step {step}; lower the learning rate.")
                since, tokens_since, steps_since = now, 0, 0
                losses.zero_()
            if step % save_every == 0:
                self._save_state()
            if after_step is not None:
                after_step(step)

    def store(self) -> None:
        """Write the model as it ships: bf16 weights, configuration, tokenizer and summary."""
        self.model.bfloat16().save_pretrained(self.out)
        build_tokenizer = load_target(self.recipe.tokenizer)
        assert callable(build_tokenizer)
        build_tokenizer().save_pretrained(self.out)
        size = (self.out / WEIGHTS).stat().st_size
        if size > MOST_BYTES:
            raise KvbenchError(f"The stored weights have {size} bytes; at most {MOST_BYTES} are allowed.")
        progress = self.progress
        parameters = sum(p.numel() for p in self.model.parameters())
        summary = {
            "parameters": parameters,
            "bytes": size,
            "steps": progress.step,
            "tokens": self.tokens,
            "seconds": round(progress.elapsed, 1),
            "ended_by": "time" if progress.by_time >= 1 else "steps",
            "limit_seconds": progress.limit,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "torch": torch.__version__,
            "recipe": self.recipe.as_dict(),
            "started_from": json.loads((self.start / SUMMARY).read_text("utf-8")) if self.start else None,
        }
        (self.out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

    def _step(self, batch: Batch, progress: float) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Do one optimizer step; return learning rate, loss and gradient norm."""
        recipe = self.recipe.optimizer
        rate = recipe.learning_rate * rate_share(self.progress.step, progress, recipe)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        return rate, loss.detach(), norm

    def _save_state(self) -> None:
        counters = {"tokens": self.tokens, "seconds": self.progress.elapsed}
        save_state(self.out, self.progress.step, {"model": self.model}, self.optimizer, counters)


def _begin_from(model: Qwen3ForCausalLM, folder: Path) -> str:
    """Put the stored weights of a folder into the model; return their SHA-256.

    Raises:
        KvbenchError: there are none, or they are another model's.
    """
    path = folder / WEIGHTS
    try:
        weights = load_file(path)
        found = model.load_state_dict(weights, strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise KvbenchError(f"The training cannot start from {path}: {reason}") from error
    # The output matrix is the embedding, which is stored once.
    if strange := [*found.unexpected_keys, *(key for key in found.missing_keys if key != "lm_head.weight")]:
        raise KvbenchError(f"The training cannot start from {path}: '{strange[0]}' is in one of the two models only.")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.train.reference_lm", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="TOML file")
    parser.add_argument("--out", type=Path, required=True, help="output folder; an interrupted training there goes on")
    parser.add_argument("--start", type=Path, help="folder with the stored model of an earlier training to go on from")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--minutes", type=float, help="time limit; the learning rate is annealed by then")
    parser.add_argument("--seed", type=int, help="instead of the recipe's")
    parser.add_argument("--tokens-per-step", type=int, help="instead of the recipe's")
    parser.add_argument(
        "--level", type=int, action="append", help="train and evaluate on these generation lengths only"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes making batches"
    )
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--eval-problems", type=int, default=200, help="per task and generation length")
    parser.add_argument("--no-resume", action="store_true", help="start afresh whatever the output folder holds")
    parser.add_argument("--only-evaluate", action="store_true", help="evaluate the model stored in the output folder")
    given = parser.parse_args(arguments)
    levels = sorted(given.level or [])
    stages = (Stage(tuple((level, 1.0) for level in levels)),) if levels else None
    recipe = ReferenceRecipe.from_file(given.recipe).changed(
        steps=given.steps, seed=given.seed, tokens_per_step=given.tokens_per_step, stages=stages
    )
    device = torch.device(given.device)
    try:
        if not given.only_evaluate:
            training = ReferenceTraining(
                recipe, given.out, device, given.minutes, given.start, resume=not given.no_resume
            )
            training.run(given.workers, given.log_every, given.save_every)
            training.store()
    except KvbenchError as error:
        parser.exit(2, f"{error}\n")
    evaluate(recipe, given.out, device, given.eval_problems, recipe.levels)
    write_card(given.out)
    if not given.only_evaluate:
        # What is left is a model, not an unfinished training.
        for name in (STATE, CONFIGURATION):
            (given.out / name).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
