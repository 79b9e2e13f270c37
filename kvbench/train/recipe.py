"""How a policy is trained, as a TOML file that a person can read."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
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
        levels: generation length -> weight with which a step draws it.
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
    """

    steps: int = 1600
    tokens: int = 32768
    levels: Mapping[int, float] = field(default_factory=lambda: {1024: 1.0, 2048: 1.0})
    crs: tuple[str, ...] = ("0.75", "0.875")
    tasks: tuple[str, ...] = ()
    policy: Mapping[str, Any] = field(default_factory=lambda: {"sinks": 4, "window": 48, "hidden": 128})
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
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise KvbenchError(f"The recipe setting '{name}' is {getattr(self, name)}; it has to be at least 1.")
        if not self.levels or not self.crs or min(self.levels.values()) < 0 or sum(self.levels.values()) <= 0:
            raise KvbenchError("A recipe needs at least one level with a positive weight and one compression ratio.")
        if self.boundary_slots < 0:
            raise KvbenchError(
                f"The recipe setting 'boundary_slots' is {self.boundary_slots}; it has to be at least 0."
            )
        if self.target_power <= 0:
            raise KvbenchError(f"The recipe setting 'target_power' is {self.target_power}; it has to be above 0.")
        if self.normaliser not in ("dense", "sparse"):
            raise KvbenchError(f"The recipe setting 'normaliser' is '{self.normaliser}'; write 'dense' or 'sparse'.")
        for cr in self.crs:
            parse_cr(cr)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Recipe:
        """Reads a recipe that ships with kvbench, by name, or anybody's own, by path.

        Raises:
            KvbenchError: there is no such file, it is not TOML, or it has a wrong setting.
        """
        path = find(name_or_path, "train")
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise KvbenchError(f"The training recipe {path} is not TOML: {error}.") from error
        return cls().replace(settings)

    def replace(self, settings: Mapping[str, Any]) -> Recipe:
        """This recipe with other settings, given as TOML or JSON values.

        Raises:
            KvbenchError: a setting does not exist or does not fit.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: _converted(name, value, fields) for name, value in settings.items()})

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON values; `replace` understands them."""
        return {
            **dataclasses.asdict(self),
            "levels": {str(level): weight for level, weight in self.levels.items()},
        }

    def lr_factor(self, step: int) -> float:
        """Share of the learning rates at a step, counted from 0: a rise, a plateau, a straight fall."""
        left = (self.steps - step) / self.steps
        fall = 1.0 if left >= self.decay else self.final_lr + (1 - self.final_lr) * left / self.decay
        return min(1.0, (step + 1) / max(1, self.warmup)) * fall


def _converted(name: str, value: Any, current: Mapping[str, Any]) -> Any:
    """One setting in the type of the current one."""
    if name not in current:
        raise unknown_name("recipe setting", name, current)
    try:
        if name == "levels":
            return {int(level): float(weight) for level, weight in value.items()}
        if name == "policy":
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
