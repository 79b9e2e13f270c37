"""From what was asked for to cells: the grid, its dense twins, and what is skipped and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from kvbench.core.budget import Budget
from kvbench.core.cell import Cell
from kvbench.core.errors import KvbenchError
from kvbench.core.result import Result
from kvbench.harness.choices import Choice, Choices
from kvbench.harness.options import Checked, Requested
from kvbench.harness.problems import ProblemSet, ProblemSource

if TYPE_CHECKING:
    from kvbench.models.source import LoadedModel

_ROWS = {"cpu": 32, "cuda": 256}


@dataclass(frozen=True)
class Planned:
    """A cell, the policy that runs in it, and why it does not run if it does not."""

    cell: Cell
    choice: Choice
    held_out: bool
    skip: str | None = None

    def row(self) -> Result:
        """The cell's row with nothing measured yet; why it is skipped if it is."""
        checkpoint = self.choice.checkpoint
        blank = Result.of(self.cell, "ok" if self.skip is None else "skipped", self.skip, held_out=self.held_out)
        return replace(blank, variant=checkpoint.variant or None if checkpoint is not None else None)


@dataclass(frozen=True)
class Plan:
    """All cells of a grid, dense twins first; cells on the same LM lie together.

    Attributes:
        planned: of the whole grid.
        mine: those of this shard.
        left_out: policies that `all` left out, one sentence each.
    """

    planned: tuple[Planned, ...]
    mine: tuple[Planned, ...]
    left_out: tuple[str, ...] = ()


def make_plan(checked: Checked, choices: Choices, loaded: LoadedModel, problems: ProblemSource) -> Plan:
    """Lay out the grid.

    Raises:
        KvbenchError: every cell would be skipped.
    """
    planner = _Planner(checked, loaded, problems)
    found: dict[str, Planned] = {}
    for choice in [*_dense(checked, choices), *(c for c in choices.policies if c.policy.evicts)]:
        for planned in planner.cells(choice):
            # The same cell twice is asked for easily: 7/8 and 0.875, or `full` and its twin.
            found.setdefault(planned.cell.key, planned)
    ordered = sorted(found.values(), key=_lm)
    _refuse_all_skipped(ordered, choices, loaded)
    mine = tuple(planned for planned in ordered if checked.shard.holds(planned.cell.key))
    return Plan(tuple(ordered), mine, choices.left_out)


def automatic_rows(device: str, completions: int) -> int:
    """Sequences side by side: fixed by the device and the work, never by what happens to be free."""
    return min(_ROWS.get(device, _ROWS["cpu"]), completions)


class _Planner:
    def __init__(self, checked: Checked, loaded: LoadedModel, problems: ProblemSource) -> None:
        self._checked = checked
        self._loaded = loaded
        self._problems = problems

    def cells(self, choice: Choice) -> Iterator[Planned]:
        """Every cell of one policy; one a task, length and seed for `full`."""
        checked = self._checked
        budgets: tuple[Requested | None, ...] = checked.budgets if choice.policy.evicts else (None,)
        apart = dict(checked.lengths)
        lengths = [(length, task) for length, task in product(checked.gen_lens, checked.tasks) if task not in apart]
        lengths += [(length, task) for task, length in apart.items()]
        for seed, (gen_length, task), requested in product(checked.seeds, lengths, budgets):
            problems = self._problems.get(task, gen_length, checked.limit, seed)
            reference = problems.longest + self._problems.tasks[task].new_tokens(gen_length)
            if requested is not None and checked.reference_length is not None:
                reference = checked.reference_length
            cell = self._cell(choice, task, gen_length, seed, requested, reference, problems)
            skip = self._skip(choice, cell, problems.longest)
            yield Planned(cell, choice, self._problems.tasks[task].held_out, skip)

    def _cell(
        self,
        choice: Choice,
        task: str,
        gen_length: int,
        seed: int,
        requested: Requested | None,
        reference: int,
        problems: ProblemSet,
    ) -> Cell:
        checked, loaded = self._checked, self._loaded
        slots = None
        if requested is not None:
            slots = requested.slots if requested.cr is None else Budget.from_cr(requested.cr, reference).slots
        return Cell(
            model=loaded.name,
            weights_hash=loaded.weights_hash,
            policy=choice.policy.name,
            policy_args=choice.args,
            checkpoint=choice.checkpoint.hash if choice.checkpoint is not None else None,
            adapted_lm=choice.adapted.hash if choice.adapted is not None else None,
            task=task,
            task_version=self._problems.tasks[task].version,
            gen_length=gen_length,
            slots=slots,
            cr=requested.text if requested is not None else None,
            reference_length=reference,
            problems=len(problems.problems),
            problems_requested=checked.limit if len(problems.problems) < checked.limit else None,
            data_revision=self._problems.revision(task),
            chat_template=problems.chat_template,
            samples=checked.samples,
            seed=seed,
            temperature=checked.temperature,
            top_p=checked.top_p,
            top_k=checked.top_k,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=loaded.device.type,
            rows=checked.rows or automatic_rows(loaded.device.type, checked.limit * checked.samples),
            attention=checked.decode_path,
        )

    def _skip(self, choice: Choice, cell: Cell, longest: int) -> str | None:
        needed = longest + self._problems.tasks[cell.task].new_tokens(cell.gen_length)
        if needed > self._loaded.max_positions:
            return (
                f"Task '{cell.task}' at generation length {cell.gen_length} needs {needed} positions "
                f"(prompt {longest}); model '{cell.model}' has {self._loaded.max_positions}."
            )
        if cell.slots is None:
            return None
        try:
            choice.policy.checked_split(cell.slots, self._loaded.geometry)
        except KvbenchError as error:
            return str(error)
        return None


def _dense(checked: Checked, choices: Choices) -> list[Choice]:
    """The base twin, and if it is asked for one for every LM that a policy runs on."""
    wanted = any(not choice.policy.evicts for choice in choices.policies)
    if not checked.dense and not wanted:
        return []
    if not checked.dense:
        return [choice for choice in choices.policies if not choice.policy.evicts]
    if not checked.dense_adapted:
        return [choices.dense]
    adapted = {c.adapted.hash: c.adapted for c in choices.policies if c.adapted is not None}
    return [
        choices.dense,
        *(Choice(choices.dense.policy, adapted=checkpoint) for checkpoint in adapted.values()),
    ]


def _lm(planned: Planned) -> tuple[str, bool]:
    """Cells on one LM together, the base model first, its dense twin first of all; otherwise as asked for."""
    return planned.cell.adapted_lm or "", planned.cell.slots is not None


def _refuse_all_skipped(planned: list[Planned], choices: Choices, loaded: LoadedModel) -> None:
    """Nothing to measure is a wrong command, not an empty table."""
    evicting = [p for p in planned if p.cell.slots is not None]
    asked = evicting or planned
    if not asked or any(p.skip is None for p in asked):
        return
    if len(asked) == 1:
        raise KvbenchError(asked[0].skip or "")
    needs = {c.policy.name: c.policy.smallest_budget(loaded.geometry) for c in choices.policies if c.policy.evicts}
    largest = max((p.cell.slots or 0 for p in evicting), default=0)
    if evicting and all(largest < smallest for smallest in needs.values()):
        smallest = ", ".join(f"'{name}' needs at least {count} slots" for name, count in needs.items())
        raise KvbenchError(
            f"Every cell is below its policy's smallest budget: the largest here is {largest} slots, and {smallest}."
        )
    raise KvbenchError(f"None of the {len(asked)} cells can run. The first: {asked[0].skip}")
