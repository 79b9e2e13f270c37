"""From what was asked for to cells: the grid, its dense twins, stock transformers, and what is skipped and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product

from kvbench.core.budget import Budget
from kvbench.core.errors import KvbenchError
from kvbench.core.policy import LearnedPolicy, Policy
from kvbench.efficiency.clock import STEPS_BESIDE
from kvbench.efficiency.heads import SYNTHETIC
from kvbench.efficiency.options import CheckedEfficiency
from kvbench.efficiency.record import EfficiencyCell
from kvbench.harness.choices import make_policy
from kvbench.harness.environment import environment
from kvbench.harness.options import Requested
from kvbench.models.checkpoint import Checkpoint, checkpoint_of, shipped
from kvbench.models.source import LoadedModel
from kvbench.plugins import Registry

BASELINE = "streaming_llm"
"""What scoring is measured against: a victim that follows from the position."""


@dataclass(frozen=True)
class Choice:
    """A policy as it is measured, and its trained weights if there are any for the model."""

    policy: Policy
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class Planned:
    """A cell, what runs in it (None: stock transformers), and why it does not run if it does not."""

    cell: EfficiencyCell
    choice: Choice | None
    skip: str | None = None


def choose(checked: CheckedEfficiency, loaded: LoadedModel, registry: Registry) -> list[Choice]:
    """The policies that were asked for; learned ones with a checkpoint where the model has one, else with random scorers.

    Raises:
        KvbenchError: a hyper-parameter or a checkpoint does not fit.
    """
    given = {}
    for folder in checked.run.checkpoints:
        checkpoint = Checkpoint.load(folder)
        checkpoint.require(loaded)
        given[checkpoint.policy_name] = checkpoint
    choices, used = [], set()
    for name in checked.run.policies:
        entry = registry.policy(name)
        found = shipped(name, loaded.name) if entry.learned and not loaded.random else None
        trained = given.get(checkpoint_of(name)) or (Checkpoint.load(found) if found is not None else None)
        if entry.learned and trained is not None:
            choices.append(Choice(trained.policy(name), trained))
            continue
        policy, arguments = make_policy(entry, checked.run.policy_args)
        used |= {argument for argument, _ in arguments}
        fields = {field.name for field in dataclasses.fields(policy)} - {argument for argument, _ in arguments}
        values = {name: value for name, value in checked.parameters.items() if name in fields}
        choices.append(Choice(dataclasses.replace(policy, **values) if entry.learned else policy))
    unused = next((name for name, _ in checked.run.policy_args if name not in used), None)
    if unused is not None:
        raise KvbenchError(f"None of the policies takes the argument '{unused}' here; 'kvbench describe' shows them.")
    return choices


def make_plan(checked: CheckedEfficiency, loaded: LoadedModel, registry: Registry) -> list[Planned]:
    """Every cell: stock transformers and the dense twin first, then policies in the order given, short lengths first.

    Raises:
        KvbenchError: a hyper-parameter or a checkpoint does not fit, or every cell would be skipped.
    """
    choices = choose(checked, loaded, registry)
    dense = Choice(make_policy(registry.policy("full"), ())[0])
    wanted = [choice for choice in choices if choice.policy.evicts]
    if checked.options.dense or len(wanted) < len(choices):
        wanted.insert(0, dense)
    found: dict[str, Planned] = {}
    for planned in [*_stock(checked, loaded), *(p for choice in wanted for p in _cells(checked, choice, loaded))]:
        # The same cell twice is asked for easily: 7/8 and 0.875.
        found.setdefault(planned.cell.key, planned)
    plan = list(found.values())
    if plan and all(planned.skip is not None for planned in plan):
        raise KvbenchError(f"None of the {len(plan)} cells can run. The first: {plan[0].skip}")
    return plan


def _stock(checked: CheckedEfficiency, loaded: LoadedModel) -> Iterator[Planned]:
    if not checked.options.stock:
        return
    for batch, length in product((b for b in checked.batches if b is not None), checked.run.gen_lens):
        cell = dataclasses.replace(
            _cell(checked, loaded, length, batch), source=f"transformers {version('transformers')}", decode_path="plain"
        )
        yield Planned(cell, None, _skip(cell, None, loaded))


def _cells(checked: CheckedEfficiency, choice: Choice, loaded: LoadedModel) -> Iterator[Planned]:
    options, policy = checked.options, choice.policy
    budgets: tuple[Requested | None, ...] = checked.run.budgets if policy.evicts else (None,)
    for batch, requested, length in product(checked.batches, budgets, checked.run.gen_lens):
        cell = _cell(checked, loaded, length, batch)
        slots = None
        if requested is not None:
            of_ratio = None if requested.cr is None else Budget.from_cr(requested.cr, cell.reference_length).slots
            slots = requested.slots if of_ratio is None else of_ratio
        scorer = None
        if isinstance(policy, LearnedPolicy) and policy.scorer(loaded.geometry) is not None:
            scorer = "random" if choice.checkpoint is None else choice.checkpoint.hash
        cell = dataclasses.replace(
            cell,
            policy=policy.name,
            policy_args=_arguments(policy),
            scorer=scorer,
            cr=None if requested is None else requested.text,
            slots=slots,
            points=options.points,
            whole=options.whole,
            audited=options.audited,
            decode_path=checked.run.decode_path,
            heads=None if policy.hard_budget else str(options.heads or SYNTHETIC),
        )
        yield Planned(cell, choice, _skip(cell, choice, loaded))


def _cell(checked: CheckedEfficiency, loaded: LoadedModel, length: int, batch: int | None) -> EfficiencyCell:
    """The dense cell of a length and batch size."""
    device = loaded.device.type
    return EfficiencyCell(
        source="kvbench",
        model=loaded.name,
        weights_hash=loaded.weights_hash,
        weights="random" if loaded.random else "real",
        policy="full",
        reference_length=checked.run.reference_length or length,
        gen_length=length,
        batch_asked=batch,
        memory_limit=checked.memory if batch is None else None,
        prompt_length=min(checked.options.prompt, length),
        steps=checked.options.steps,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=device,
        device_name=environment(device).device_name,
    )


def _skip(cell: EfficiencyCell, choice: Choice | None, loaded: LoadedModel) -> str | None:
    least = cell.steps + STEPS_BESIDE + 1
    if cell.gen_length < least:
        return f"Length {cell.gen_length} is too short to time {cell.steps} steps at; it takes {least} tokens."
    if cell.gen_length > loaded.max_positions:
        return f"Length {cell.gen_length} is beyond the {loaded.max_positions} positions of model '{cell.model}'."
    if choice is None or cell.slots is None:
        return None
    try:
        choice.policy.checked_split(cell.slots, loaded.geometry)
    except KvbenchError as error:
        return str(error)
    return None


def _arguments(policy: Policy) -> str:
    """The hyper-parameters that differ from the defaults."""
    changed = (f for f in dataclasses.fields(policy) if getattr(policy, f.name) != f.default)
    return ",".join(f"{field.name}={getattr(policy, field.name)}" for field in changed)
