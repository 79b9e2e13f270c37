"""Codebook: a table in the prompt; the first digit of a running sum says which entry is added next."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from kvbench.core.task import Trace
from kvbench_tasks.reference_task import (
    LETTERS,
    ReferenceTask,
    Size,
    Store,
    entries,
    head,
    read_count,
    read_entries,
    spaced,
)
from kvbench_tasks.trace_writer import TraceWriter


class Codebook(ReferenceTask):
    """`codebook 0 6 d : a 1 2 3 ; b 4 5 6 ; c 7 8 9 ; d 0 1 2 ; sum 3 4 5 ; do`: six look-ups in a table of four.

    Entry j of a table of m is chosen when the first digit of the sum is j modulo m. The table must stay at hand to
    the end: prompts whose look-ups soon run in a small circle are drawn again. The answer is the sum.
    """

    name: ClassVar[str] = "codebook"
    sizes: ClassVar[Mapping[int, Size]] = MappingProxyType(
        {
            128: Size(1, 2),
            256: Size(3, 3),
            512: Size(6, 3),
            1024: Size(12, 10),
            2048: Size(24, 10),
            4096: Size(49, 10),
        }
    )

    def draw_prompt(self, rng: random.Random, size: Size) -> str:
        """Return a random prompt."""
        letters = LETTERS[: size.items]
        while True:
            table, total = entries(rng, letters), spaced(rng.randrange(1000))
            prompt = f"{head(self.name, size.steps, letters[-1])} {table} sum {total} ; do"
            if size.steps == 1 or _longest_rest(_chosen_rows(prompt)) > size.steps // 4 + 1:
                return prompt

    def solve(self, prompt: str) -> Trace:
        """Return the reference solution; each header repeats the last table entry, which tells the modulus."""
        writer = TraceWriter(prompt)
        table = writer.prompt_values(first_at=6)
        total = table.pop("sum")
        rows = list(table.values())
        size_at = 4
        for _ in range(writer.count):
            writer.header()
            size_at = writer.copy(size_at)
            row = rows[int(total.digits[0]) % len(rows)]
            first_digit_at = len(writer.tokens) + 1
            total = writer.add_and_store(total, (), row, (first_digit_at, size_at))
        writer.begin_answer()
        writer.answer_digits(total)
        return writer.finish()

    def interpret(self, prompt: str) -> tuple[list[Store], str]:
        """Return what each step stores and the answer."""
        numbers = read_entries(prompt)
        total = numbers.pop("sum")
        table = list(numbers.values())
        stored: list[Store] = []
        for row in _chosen_rows(prompt):
            total = (total + table[row]) % 1000
            stored.append(("sum", total))
        return stored, spaced(total)


def _chosen_rows(prompt: str) -> list[int]:
    """Return which entry each step looks up."""
    numbers = read_entries(prompt)
    total = numbers.pop("sum")
    table = list(numbers.values())
    rows = []
    for _ in range(read_count(prompt)):
        rows.append(total // 100 % len(table))
        total = (total + table[rows[-1]]) % 1000
    return rows


def _longest_rest(rows: list[int]) -> int:
    """Return the largest number of steps that an entry waits for a look-up, from its last one or from the prompt."""
    last: dict[int, int] = {}
    longest = 0
    for step, row in enumerate(rows):
        longest = max(longest, step - last.get(row, -1))
        last[row] = step
    return longest
