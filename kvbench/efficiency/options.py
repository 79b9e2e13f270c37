"""What somebody asked to measure, checked as far as that needs neither torch nor a model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.core.errors import KvbenchError
from kvbench.harness.options import Checked, RunOptions, check
from kvbench.plugins import Registry
from kvbench.train.recipe import Recipe

DEFAULT_BATCH = 1
DEFAULT_STEPS = 30
DEFAULT_PROMPT = 1024

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class EfficiencyOptions:
    """The command line of `kvbench efficiency`.

    Attributes:
        run: what it has in common with `kvbench run`: policies, ratios or slots, lengths, their arguments, checkpoints, device,
            number type, threads, output folder; `model` is the shape.
        batches: sequences side by side.
        largest: also the largest batch that fits, of every policy.
        memory: GiB that the largest batch may take; the whole device if left out.
        prompt: tokens of the prompts whose reading is timed.
        steps: timed steps.
        points: lengths at which steps are timed.
        whole: also generate in full.
        recipe: training recipe whose hyper-parameters learned policies get.
        heads: where head lengths of policies without a hard budget are read from.
        dense, stock, scoring: measure the dense twin; stock transformers; `streaming_llm` in as many slots.
        audited: steps are counted as in `kvbench run`.
        command: the command line, for the rows.
    """

    run: RunOptions
    batches: tuple[int, ...] = ()
    largest: bool = False
    memory: float | None = None
    prompt: int = DEFAULT_PROMPT
    steps: int = DEFAULT_STEPS
    points: int = 1
    whole: bool = False
    recipe: str | None = None
    heads: Path | None = None
    dense: bool = True
    stock: bool = True
    scoring: bool = True
    audited: bool = False
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckedEfficiency:
    """`EfficiencyOptions` with every name known and every number in range.

    Attributes:
        options: as given.
        run: the part shared with `kvbench run`.
        batches: with None, at the end, for the largest.
        memory: bytes.
        parameters: hyper-parameters from the recipe, or its defaults, as in training.
    """

    options: EfficiencyOptions
    run: Checked
    batches: tuple[int | None, ...]
    memory: int | None
    parameters: Mapping[str, Any]


def check_efficiency(options: EfficiencyOptions, registry: Registry) -> CheckedEfficiency:
    """Refuse what cannot be meant, and fill in the defaults.

    Raises:
        KvbenchError: one sentence about the first thing that is wrong.
    """
    for option, value, least in (
        ("--steps", options.steps, 1),
        ("--points", options.points, 1),
        ("--prompt-len", options.prompt, 1),
        *(("--batch", batch, 1) for batch in options.batches),
    ):
        if value < least:
            raise KvbenchError(f"{option} is {value}; it has to be at least {least}.")
    if options.memory is not None and options.memory <= 0:
        raise KvbenchError(f"--memory is {options.memory}; it has to be above 0.")
    if options.memory is not None and not options.largest:
        raise KvbenchError("--memory limits the largest batch; add --largest.")
    batches = tuple(dict.fromkeys(options.batches))
    default = () if options.largest else (DEFAULT_BATCH,)
    return CheckedEfficiency(
        options=options,
        run=check(options.run, registry),
        batches=(*(batches or default), *((None,) if options.largest else ())),
        memory=None if options.memory is None else int(options.memory * _GIB),
        parameters={} if options.recipe is None else Recipe.load(options.recipe).policy,
    )


def command_line(arguments: Sequence[str], program: str = "kvbench") -> str:
    """The command as somebody could type it again."""
    return shlex.join([program, *arguments])
