"""Prints how large the live set of every reference task is, against the slots that a policy has; run with `-m`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from statistics import median

from kvbench.core.budget import slots_for
from kvbench.core.task import live_set_sizes
from kvbench_tasks.chain import Chain
from kvbench_tasks.codebook import Codebook
from kvbench_tasks.ledger import Ledger
from kvbench_tasks.program import Program
from kvbench_tasks.recurrence import Recurrence
from kvbench_tasks.reference_task import ReferenceTask
from kvbench_tasks.stack import Stack

FAMILIES: tuple[type[ReferenceTask], ...] = (Recurrence, Codebook, Ledger, Program, Chain, Stack)

WINDOW = 16
SINKS = 4
SCORER_SLOTS = 3
"""What a learned scorer's state costs, in slots."""


@dataclass(frozen=True, slots=True)
class LiveSet:
    """The live set of one level of a task over some problems.

    Attributes:
        prompt: tokens of the prompt.
        completion: tokens of the shortest and of the longest completion.
        live: largest number of live tokens outside sinks and window.
        reach: how far back the furthest look-up has to reach, the median over problems.
        beyond: share of problems in which that is further than the budget with 3/4 removed.
        slots: long-range slots with 7/8 of the cache removed.
        budget: all slots with 3/4 removed.
    """

    task: str
    level: int
    steps: int
    items: int
    prompt: int
    completion: tuple[int, int]
    live: int
    reach: int
    beyond: float
    slots: int
    budget: int

    @property
    def fits(self) -> bool:
        """Whether the live set takes at most half of the slots at 7/8, yet recency fails every problem at 3/4."""
        return 2 * self.live <= self.slots and self.beyond == 1


def measure(task: ReferenceTask, level: int, n: int = 100) -> LiveSet:
    """Return the live set of a level over its first `n` evaluation problems."""
    traces = [task.trace(problem) for problem in task.problems(level, n, seed=0)]
    lengths = [len(trace.tokens) - trace.prompt_len for trace in traces]
    reference = task.longest_prompt(level) + level
    three_quarters, seven_eighths = (slots_for(Fraction(cr), reference) for cr in ("3/4", "7/8"))
    protected = SINKS + WINDOW + SCORER_SLOTS
    size = task.size(level)
    reaches = [max(trace.reaches) for trace in traces]
    return LiveSet(
        task.name,
        level,
        size.steps,
        size.items,
        task.longest_prompt(level),
        (min(lengths), max(lengths)),
        max(max(live_set_sizes(trace, WINDOW, SINKS)) for trace in traces),
        int(median(reaches)),
        sum(reach > three_quarters for reach in reaches) / n,
        seven_eighths - protected,
        three_quarters,
    )


COLUMNS = (
    "task",
    "level",
    "steps",
    "items",
    "prompt",
    "completion",
    "live",
    "reach",
    "B 3/4",
    "beyond",
    "k 7/8",
    "fits",
)


def line(row: LiveSet) -> str:
    """Return a row of the report, Markdown."""
    low, high = row.completion
    lengths = str(low) if low == high else f"{low}-{high}"
    known = (row.task, row.level, row.steps, row.items, row.prompt, lengths, row.live, row.reach)
    slots = (row.budget, f"{row.beyond:.2f}", row.slots, "yes" if row.fits else "no")
    return f"| {' | '.join(map(str, known + slots))} |"


def report() -> Iterator[str]:
    """Yield the lines of the report, a Markdown table."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    for family in FAMILIES:
        task = family()
        for level in task.levels:
            yield line(measure(task, level))


if __name__ == "__main__":
    print("\n".join(report()))
