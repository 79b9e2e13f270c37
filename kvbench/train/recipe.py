"""How a policy is trained, as a TOML file that a person can read."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.core.budget import parse_cr
from kvbench.core.errors import KvbenchError, unknown_name
from kvbench.recipes import find


@dataclass(frozen=True)
class Recipe:
    """Settings of one training; the defaults are those of the reference model.

    Attributes:
        steps: optimiser steps.
        tokens: tokens a step, at most; decides how many rows a step has.
        levels: generation length -> weight with which a step draws it; with `data`, length of a packed row -> weight.
        crs: compression ratios, of which each step draws one; as written, so that 7/8 stays exact.
        tasks: task names; empty for every task that is not held out.
        policy: hyper-parameters given to each policy that has them.
        lm_lr, scorer_lr: learning rates of the LM and of the scorers.
        betas, weight_decay: of AdamW.
        warmup: steps over which the learning rates rise.
        decay: share of the steps, at the end, over which they fall.
        final_lr: what they fall to, as a share.
        clip: largest gradient norm, of LM and scorers apart.
        top: tokens of the teacher's distribution that are compared.
        boundary_weight: factor of the boundary loss.
        boundary_queries: queries a row at which it is taken.
        boundary_slots: the boundary loss draws its long-range slots from this number up to the step's; 0 for the step's.
            Without it, no token of the first budget's length is ever a newcomer, so its score is trained as an
            incumbent's only.
        boundary_future: later queries that a token's mass is averaged over, at least.
        margin, balance: see `losses.boundary_loss`.
        normaliser: `dense` or `sparse`: what a future mass is relative to.
        target_power: exponent of the mean over later queries: 1 as in the paper, larger for single, sharp uses.
        eval_every: steps between evaluations on held-back problems.
        eval_rows: rows a level in an evaluation.
        save_every: steps after which a killed run goes on.
        data: rows from a data set instead of tasks, see `packed.DataSettings`.
        freeze_lm: only scorers are trained.
        lm_schedule: `decay`: the LM's learning rate rises and falls with the scorers'; `constant`: it stays.
        group, count, lookahead: variants of the target, see `target.TargetKind`.
        ramp: share of the steps over which gates reach their compression ratio (DMS).
        gate_weight: factor of the gates' loss (DMS).
        accumulation: micro-batches that one process makes of its rows of a step.
        checkpointing: layers are computed again in the backward pass instead of stored.
        precision: of the models' arithmetic: `bf16` by autocast, `fp32`, or `auto`: bf16 on a GPU. Weights are fp32.
        teacher_weights: `fp32`, or `bf16` to halve the teacher.
        trainer: further arguments of transformers' TrainingArguments, such as `fsdp` and `report_to`.
    """

    steps: int = 1600
    tokens: int = 32768
    levels: Mapping[int, float] = field(default_factory=lambda: {1024: 1.0, 2048: 1.0})
    crs: tuple[str, ...] = ("0.75", "0.875", "0.9375")
    tasks: tuple[str, ...] = ()
    policy: Mapping[str, Any] = field(
        default_factory=lambda: {"sinks": 4, "window": 48, "hidden": 128, "decay": "learned"}
    )
    lm_lr: float = 1e-3
    scorer_lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 1e-4
    warmup: int = 50
    decay: float = 0.4
    final_lr: float = 0.05
    clip: float = 1.0
    top: int = 256
    boundary_weight: float = 1.0
    boundary_queries: int = 192
    boundary_slots: int = 8
    boundary_future: int = 128
    margin: float = 0.5
    balance: bool = False
    normaliser: str = "dense"
    target_power: float = 8.0
    eval_every: int = 400
    eval_rows: int = 16
    save_every: int = 400
    data: Mapping[str, Any] = field(default_factory=dict)
    freeze_lm: bool = False
    lm_schedule: str = "decay"
    group: str = "mean"
    count: bool = True
    lookahead: int = 0
    ramp: float = 0.6
    gate_weight: float = 1.0
    accumulation: int = 1
    checkpointing: bool = False
    precision: str = "auto"
    teacher_weights: str = "fp32"
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive = (
            "steps",
            "tokens",
            "top",
            "boundary_queries",
            "boundary_future",
            "eval_every",
            "eval_rows",
            "save_every",
            "accumulation",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise KvbenchError(f"The recipe setting '{name}' is {getattr(self, name)}; it has to be at least 1.")
        if not self.levels or not self.crs or min(self.levels.values()) < 0 or sum(self.levels.values()) <= 0:
            raise KvbenchError("A recipe needs at least one level with a positive weight and one compression ratio.")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise KvbenchError(
                    f"The recipe setting '{name}' is '{getattr(self, name)}'; write {' or '.join(map(repr, words))}."
                )
        for name in ("margin", "lookahead", "gate_weight", "boundary_slots"):
            if getattr(self, name) < 0:
                raise KvbenchError(f"The recipe setting '{name}' is {getattr(self, name)}; it has to be at least 0.")
        if self.target_power <= 0:
            raise KvbenchError(f"The recipe setting 'target_power' is {self.target_power}; it has to be above 0.")
        if self.data and self.tasks:
            raise KvbenchError("A recipe has 'tasks' or 'data', not both.")
        for cr in self.crs:
            parse_cr(cr)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Recipe:
        """Reads a recipe that ships with kvbench, by name, or anybody's own, by path.

        Raises:
            KvbenchError: there is no such file, it is not TOML, or it has a wrong setting.
        """
        return cls().replace(_settings(find(name_or_path, "train")))

    def replace(self, settings: Mapping[str, Any]) -> Recipe:
        """This recipe with other settings, given as TOML or JSON values.

        Raises:
            KvbenchError: a setting does not exist or does not fit.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: _converted(name, value, fields) for name, value in settings.items()})

    def assigned(self, texts: Sequence[str]) -> Recipe:
        """This recipe with settings from `KEY=VALUE` texts: values as in TOML, bare words too.

        `data.split=test` changes one setting of a table and leaves the others.

        Raises:
            KvbenchError: a text is not of this form, or its setting does not exist or does not fit.
        """
        settings: dict[str, Any] = {}
        for text in texts:
            name, equals, value = (part.strip() for part in text.partition("="))
            if not equals:
                raise KvbenchError(f"The setting '{text}' is not KEY=VALUE.")
            try:
                parsed = tomllib.loads(f"value = {value}")["value"]
            except tomllib.TOMLDecodeError:
                parsed = value
            table, dot, key = name.replace("-", "_").partition(".")
            if dot:
                before = settings.get(table, getattr(self, table, {}))
                settings[table] = {**(before if isinstance(before, Mapping) else {}), key: parsed}
            else:
                settings[table] = parsed
        return self.replace(settings)

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON values; `replace` understands them."""
        return {
            **dataclasses.asdict(self),
            "levels": {str(level): weight for level, weight in self.levels.items()},
        }

    def lm_factor(self, step: int) -> float:
        """Share of the LM's learning rate at a step, counted from 0."""
        return 1.0 if self.lm_schedule == "constant" else self.lr_factor(step)

    def lr_factor(self, step: int) -> float:
        """Share of the scorers' learning rate at a step, counted from 0: a rise, a plateau, a straight fall."""
        left = (self.steps - step) / self.steps
        fall = 1.0 if left >= self.decay else self.final_lr + (1 - self.final_lr) * left / self.decay
        return min(1.0, (step + 1) / max(1, self.warmup)) * fall


_WORDS = {
    "normaliser": ("dense", "sparse"),
    "lm_schedule": ("decay", "constant"),
    "group": ("max", "mean"),
    "precision": ("auto", "bf16", "fp32"),
    "teacher_weights": ("fp32", "bf16"),
}


def _settings(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's settings over those of the recipe that it extends."""
    if path in seen:
        raise KvbenchError(f"The training recipe {path} extends itself.")
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KvbenchError(f"The training recipe {path} is not TOML: {error}.") from error
    except OSError as error:
        raise KvbenchError(f"The training recipe {path} cannot be read: {error}.") from error
    base = settings.pop("extends", None)
    if base is None:
        return settings
    # A path is meant from where the file lies, a name is a recipe that ships.
    beside = path.parent / str(base)
    return {**_settings(find(beside if beside.is_file() else base, "train"), (*seen, path)), **settings}


def _converted(name: str, value: Any, current: Mapping[str, Any]) -> Any:
    """One setting in the type of the current one."""
    if name not in current:
        raise unknown_name("recipe setting", name, current)
    try:
        if name == "levels":
            return {int(level): float(weight) for level, weight in value.items()}
        if isinstance(current[name], Mapping):
            return dict(value)
        if name == "betas":
            first, second = value
            return float(first), float(second)
        return _like(current[name], value)
    except (TypeError, ValueError, AttributeError) as error:
        raise KvbenchError(f"The recipe setting '{name}' cannot be {value!r}: {error}.") from error


def _like(old: Any, value: Any) -> Any:
    """A value in the type of an old one; TypeError or ValueError if that would change it."""
    if isinstance(old, tuple):
        if isinstance(value, str):
            raise TypeError("it is a list")
        return tuple(str(item) for item in value)
    if isinstance(old, bool) is not isinstance(value, bool):
        raise TypeError("true and false are for switches, and switches for them")
    if isinstance(old, int) and int(value) != value:
        raise TypeError("it is a whole number")
    return type(old)(value)
