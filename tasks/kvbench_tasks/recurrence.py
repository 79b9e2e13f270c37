"""Recurrence: a ring of registers; each step adds to a register what the step before has stored."""

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


class Recurrence(ReferenceTask):
    """`recurrence 0 6 c : a 1 2 3 ; b 4 5 6 ; c 7 8 9 ; do`: six steps round the ring a, b, c.

    The first step adds the last register of the ring to a, the second adds a to b, and so on. What a step stores
    is needed by the next step and then one turn of the ring later. The answer is the last stored value.
    """

    name: ClassVar[str] = "recurrence"
    sizes: ClassVar[Mapping[int, Size]] = MappingProxyType(
        {
            128: Size(1, 2),
            256: Size(3, 2),
            512: Size(6, 4),
            1024: Size(12, 6),
            2048: Size(24, 9),
            4096: Size(49, 17),
        }
    )

    def draw_prompt(self, rng: random.Random, size: Size) -> str:
        """Return a random prompt."""
        ring = LETTERS[: size.items]
        return f"{head(self.name, size.steps, ring[-1])} {entries(rng, ring)} do"

    def solve(self, prompt: str) -> Trace:
        """Return the reference solution; each header repeats the ring's last letter, to read a wrap nearby."""
        writer = TraceWriter(prompt)
        registers = writer.prompt_values(first_at=6)
        ring_at = 4
        names = list(registers)
        previous = registers[names[-1]]
        for step in range(writer.count):
            writer.header()
            ring_at = writer.copy(ring_at)
            name = names[step % len(names)]
            turned_by = (ring_at, previous.name_at) if step else (ring_at,)
            previous = writer.add_and_store(registers[name], turned_by, previous, (previous.name_at,))
            registers[name] = previous
        writer.begin_answer()
        writer.answer_digits(previous)
        return writer.finish()

    def interpret(self, prompt: str) -> tuple[list[Store], str]:
        """Return what each step stores and the answer."""
        registers = read_entries(prompt)
        names = list(registers)
        stored: list[Store] = []
        last = registers[names[-1]]
        for step in range(read_count(prompt)):
            name = names[step % len(names)]
            last = (registers[name] + last) % 1000
            registers[name] = last
            stored.append((name, last))
        return stored, spaced(last)
