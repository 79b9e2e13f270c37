"""Program: a loop with one line per register; each step looks up its line and carries it out."""

from __future__ import annotations

import random
import re
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

_LINE = re.compile(r"([a-z]) \+ ([a-z]) ;")


class Program(ReferenceTask):
    """`program 0 6 c : a 1 2 3 ; b 4 5 6 ; c 7 8 9 ; loop a + c ; b + a ; c + a ; do`: six lines of a loop are carried out.

    The line `a + c` adds c to a. Both the lines and the registers must stay at hand. The answer is the last stored
    value.
    """

    name: ClassVar[str] = "program"
    sizes: ClassVar[Mapping[int, Size]] = MappingProxyType(
        {
            128: Size(1, 2),
            256: Size(3, 2),
            512: Size(6, 3),
            1024: Size(12, 5),
            2048: Size(24, 9),
            4096: Size(49, 17),
        }
    )

    def draw_prompt(self, rng: random.Random, size: Size) -> str:
        """Return a random prompt."""
        ring = LETTERS[: size.items]
        lines = " ".join(f"{name} + {rng.choice(ring.replace(name, ''))} ;" for name in ring)
        return f"{head(self.name, size.steps, ring[-1])} {entries(rng, ring)} loop {lines} do"

    def solve(self, prompt: str) -> Trace:
        """Return the reference solution; each header repeats the ring's last letter, to read a wrap nearby."""
        writer = TraceWriter(prompt)
        registers = writer.prompt_values(first_at=6)
        names = list(registers)
        lines_at = 6 + 5 * len(names) + 1
        ring_at = 4
        last = registers[names[-1]]
        for step in range(writer.count):
            writer.header()
            ring_at = writer.copy(ring_at)
            turned_by = (ring_at, last.name_at) if step else (ring_at,)
            line = lines_at + 4 * (step % len(names))
            name, other = writer.tokens[line], writer.tokens[line + 2]
            name_at = len(writer.tokens)
            writer.look_up(line, line + 2)
            last = writer.add_and_store(registers[name], turned_by, registers[other], (line, line + 2, name_at))
            registers[name] = last
        writer.begin_answer()
        writer.answer_digits(last)
        return writer.finish()

    def interpret(self, prompt: str) -> tuple[list[Store], str]:
        """Return what each step stores and the answer."""
        registers = read_entries(prompt)
        lines = _LINE.findall(prompt)
        stored: list[Store] = []
        for step in range(read_count(prompt)):
            name, other = lines[step % len(lines)]
            registers[name] = (registers[name] + registers[other]) % 1000
            stored.append((name, registers[name]))
        return stored, spaced(stored[-1][1])
