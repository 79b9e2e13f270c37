"""The recipe of the reference model, read from a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Stage:
    """Which generation lengths a stretch of the training draws from.

    Attributes:
        levels: (generation length, probability) pairs.
        until_step: first step that no longer belongs to the stage; None for the last stage.
    """

    levels: tuple[tuple[int, float], ...]
    until_step: int | None = None


@dataclass(frozen=True, slots=True)
class OptimizerRecipe:
    """AdamW and its schedule: warm-up by steps, then constant, then a cosine."""

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    clip: float
    warmup_steps: int
    constant_share: float
    final_share: float


@dataclass(frozen=True, slots=True)
class ReferenceRecipe:
    """Everything that determines a training.

    Attributes:
        tasks: registered names.
        vocabulary: `package.module:NAME` of the words in the order of their ids.
        tokenizer: `package.module:function` that builds the tokenizer.
        model: fields of the transformers configuration; `rope_theta` apart.
        tokens_per_step: about how many tokens an optimizer step sees, padding included.
    """

    tasks: tuple[str, ...]
    vocabulary: str
    tokenizer: str
    seed: int
    steps: int
    model: dict[str, int | float] = field(hash=False)
    optimizer: OptimizerRecipe
    tokens_per_step: int
    stages: tuple[Stage, ...]

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a recipe."""
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        data = raw.pop("data")
        optimizer = raw.pop("optimizer")
        stages = [
            Stage(tuple((int(level), float(p)) for level, p in stage["levels"].items()), stage.get("until_step"))
            for stage in data["stages"]
        ]
        raw["tasks"] = tuple(raw["tasks"])
        optimizer["betas"] = tuple(optimizer["betas"])
        return cls(
            **raw,
            optimizer=OptimizerRecipe(**optimizer),
            tokens_per_step=data["tokens_per_step"],
            stages=tuple(stages),
        )

    def changed(self, **changes: int | tuple[Stage, ...] | None) -> Self:
        """Return the recipe with the given fields replaced; None leaves a field as it is."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]  # names are checked by replace

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as plain data, for comparison and for the record."""
        return asdict(self)

    @property
    def levels(self) -> tuple[int, ...]:
        """Every generation length that some stage draws, in order."""
        return tuple(sorted({level for stage in self.stages for level, _ in stage.levels}))

    def stage(self, step: int) -> Stage:
        """Return the stage of a step."""
        return next(s for s in self.stages if s.until_step is None or step < s.until_step)
