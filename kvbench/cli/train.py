"""`kvbench train`: a policy's scorer and adapted LM, from a recipe."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvbench.core.errors import KvbenchError, canonical
from kvbench.plugins import load_registry

if TYPE_CHECKING:
    import torch

    from kvbench.core.policy import LearnedPolicy
    from kvbench.entries import PolicyEntry
    from kvbench.train.recipe import Recipe
    from kvbench.train.trainer import Record

_LINE_EVERY = 50
"""Steps between two lines where no progress bar can be drawn."""

_MOST_WORKERS = 12

_SHOWN = (("kl", 5), ("boundary", 4), ("closed", 4))
"""What a line about a step tells, and with how many digits."""


def train(
    policy: Annotated[str, typer.Option("--policy", help="What to train: see 'kvbench list policies'.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the checkpoint and the log.")],
    model: Annotated[str, typer.Option("--model", help="A model's name or folder.")] = "ref",
    recipe: Annotated[str, typer.Option("--recipe", help="A recipe's name or TOML file.")] = "ref",
    steps: Annotated[int | None, typer.Option("--steps", help="Instead of the recipe's.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides rows, budgets and first weights.")] = 0,
    cr: Annotated[list[str] | None, typer.Option("--cr", help="Ratios instead of the recipe's.")] = None,
    policy_arg: Annotated[
        list[str] | None, typer.Option("--policy-arg", metavar="KEY=VALUE", help="Hyper-parameter.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Recipe setting, such as normaliser=sparse."),
    ] = None,
    teacher_cache: Annotated[
        Path | None, typer.Option("--teacher-cache", help="Folder that keeps the teacher's top logits of each row.")
    ] = None,
    precompute: Annotated[
        bool, typer.Option("--precompute", help="Only fill the teacher's cache; train afterwards.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=0, help="Processes that make rows; one less than the cores."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with what the folder holds, or start afresh.")
    ] = True,
) -> None:
    """Train a learned policy: the LM under the policy's own mask, and its scorer.

    Example: kvbench train --policy kvpop --model ref --out runs/kvpop

    Several GPUs: torchrun --nproc-per-node 8 -m kvbench train ...
    """
    entry = load_registry().policy(policy)
    if entry.runs_on:
        raise KvbenchError(f"Policy '{entry.name}' runs on a checkpoint of '{entry.runs_on}'; train that.")
    if precompute and teacher_cache is None:
        raise KvbenchError("--precompute fills the folder of --teacher-cache; give one.")
    if not entry.trainable:
        trainable = [name for name, known in load_registry().policies.items() if known.trainable]
        raise KvbenchError(f"Policy '{entry.name}' has nothing to train; trainable: {', '.join(trainable) or 'none'}.")

    import torch

    from kvbench.data.lock import Lock
    from kvbench.models.open import open_model
    from kvbench.train.recipe import Recipe
    from kvbench.train.sources import row_source
    from kvbench.train.trainer import Silent, Trainer

    changes: dict[str, Any] = {}
    if steps is not None:
        changes["steps"] = steps
    if cr:
        changes["crs"] = cr
    settings = Recipe.load(recipe).assigned(setting or []).replace(changes)
    made = _make_policy(entry, settings, policy_arg or [])
    where = _device(device)
    # What will be sharded fits no single GPU: each process takes its part from main memory.
    sharded = bool(settings.trainer.get("fsdp")) or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    loaded = open_model(model, load_registry(), torch.device("cpu") if sharded else where, torch.float32)
    lock = Lock(out)
    rows = row_source(settings, loaded.tokenizer, lock, seed)
    first = int(os.environ.get("RANK", "0")) == 0
    screen = Screen(settings, Console(quiet=not first))
    trainer = Trainer(
        loaded,
        made,
        settings,
        rows,
        out,
        device=where,
        workers=_workers(where) if workers is None else workers,
        resume=resume,
        report=screen if first else Silent(),
        teacher_cache=teacher_cache,
        variant=", ".join([*(policy_arg or []), *(setting or [])]),
    )
    if first:
        lock.write()
    if precompute:
        screen.say(f"The teacher's logits for {trainer.precompute()} steps lie in {teacher_cache}.")
        return
    with screen.bar:
        checkpoint = trainer.train()
    assert checkpoint is not None
    ratio = settings.crs[-1]
    screen.say(f"Checkpoint {checkpoint.hash[:12]} lies in {out}. To run it:")
    screen.say(f"  kvbench run --policy {entry.name} --model {model} --cr {ratio} --checkpoint {out}")


class Screen:
    """Progress: a bar on a terminal, otherwise a line now and then."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        self._console = console
        self._steps = recipe.steps
        self.bar = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[losses]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.bar.add_task("train", total=recipe.steps, losses="")

    def step(self, record: Record) -> None:
        """Shows a step."""
        speed = f"{record['tokens_per_s'] / 1000:.1f}k tokens/s"
        parts = [f"{name} {record[name]:.{digits}f}" for name, digits in _SHOWN if name in record]
        losses = " ".join([*parts, speed])
        done = record["step"] + 1
        self.bar.update(self._task, completed=done, losses=losses)
        if self.bar.disable and (done % _LINE_EVERY == 0 or done in (1, self._steps)):
            self.say(f"step {done}/{self._steps} {losses}")

    def evaluation(self, record: Record) -> None:
        """Shows an evaluation on held-back problems."""
        names = (
            ("kl", "kl"),
            ("top1", "same token"),
            ("recall", "recall"),
            ("mass", "mass kept"),
            ("closed", "dropped"),
        )
        for cr, values in record["by_cr"].items():
            shown = [f"{label} {values[name]:.4f}" for name, label in names if values.get(name) is not None]
            self.say(f"step {record['step'] + 1} held back, cr {cr}: {', '.join(shown)}")

    def say(self, text: str) -> None:
        """Prints a line as it is, never wrapped: it may be a command to copy."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _make_policy(entry: PolicyEntry, recipe: Recipe, arguments: list[str]) -> LearnedPolicy:
    """The policy with the recipe's hyper-parameters, as far as it has them, and those of the command line."""
    from kvbench.models.checkpoint import build_policy

    default = build_policy(entry, {})
    known = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    shared = {name: value for name, value in recipe.policy.items() if name in known}
    given = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise KvbenchError(f"The policy argument '{argument}' is not KEY=VALUE.")
        name = canonical(name)
        given[name] = _converted(name, text.strip(), known[name]) if name in known else text
    return build_policy(entry, {**shared, **given})


def _converted(name: str, text: str, default: object) -> object:
    """A hyper-parameter in the type of its default."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, int | float):
            return type(default)(text)
    except (ValueError, KeyError) as error:
        raise KvbenchError(f"The policy argument {name}={text} is not of type {type(default).__name__}.") from error
    return text


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise KvbenchError(f"There is no device '{name}'; use auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise KvbenchError("There is no CUDA device here; use --device cpu.")
    return device


def _workers(device: torch.device) -> int:
    """On a CPU the training itself needs the cores."""
    return 0 if device.type == "cpu" else max(0, min(_MOST_WORKERS, (os.cpu_count() or 1) - 1))
