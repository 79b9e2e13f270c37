"""Stack: values are pushed one after another and added up from the top down."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from kvbench.core.task import Trace
from kvbench_tasks.reference_task import LETTERS, ReferenceTask, Size, Store, head, read_count, read_entries, spaced
from kvbench_tasks.trace_writer import TraceWriter, zero


class Stack(ReferenceTask):
    """`stack 0 2 : a 1 2 3 ; low 4 5 6 ; high 7 8 9 ; do`: two pushes, then three pops.

    A push adds `low` to the topmost value if that is below 500, else `high`, and stores the result under the next
    letter; so one value does not tell the one beneath it. When the count has run out, the letters are popped from
    the top down to a and added up. What was pushed first comes back last. The answer is the sum.
    """

    name: ClassVar[str] = "stack"
    sizes: ClassVar[Mapping[int, Size]] = MappingProxyType(
        {
            128: Size(1, 1),
            256: Size(3, 2),
            512: Size(5, 3),
            1024: Size(11, 6),
            2048: Size(23, 12),
            4096: Size(49, 25),
        }
    )

    def draw_prompt(self, rng: random.Random, size: Size) -> str:
        """Return a random prompt."""
        first, low, high = (spaced(rng.randrange(1000)) for _ in range(3))
        return f"{head(self.name, size.items - 1)} a {first} ; low {low} ; high {high} ; do"

    def solve(self, prompt: str) -> Trace:
        """Return the reference solution; the header of a pop counts the letters below the popped one."""
        writer = TraceWriter(prompt)
        numbers = writer.prompt_values(first_at=5)
        pushed, total = [numbers["a"]], zero("sum")
        phase_at, pushes, pushes_at = 0, writer.count, writer.count_at
        for depth in range(1, pushes + 1):
            phase_at = self._header(writer, "push", phase_at, writer.count - 1, writer.count_at)
            top = pushed[-1]
            added = numbers["low" if int(top.digits[0]) < 5 else "high"]
            pushed.append(writer.add_and_store(top, (top.name_at,), added, name=LETTERS[depth]))
        above_at = pushed[-1].name_at
        for depth in range(pushes, -1, -1):
            count, source = (pushes, pushes_at) if depth == pushes else (writer.count - 1, writer.count_at)
            phase_at = self._header(writer, "pop", phase_at, count, source)
            popped_at = len(writer.tokens) + 5
            named_by = (above_at, writer.count_at, writer.count_at + 1)
            total = writer.add_and_store(total, (phase_at,), pushed[depth], named_by)
            above_at = popped_at
        writer.begin_answer(phase_at)
        writer.answer_digits(total)
        return writer.finish()

    def interpret(self, prompt: str) -> tuple[list[Store], str]:
        """Return what each step stores and the answer."""
        numbers = read_entries(prompt)
        values = [numbers["a"]]
        stored: list[Store] = []
        for i in range(read_count(prompt)):
            values.append((values[-1] + numbers["low" if values[-1] < 500 else "high"]) % 1000)
            stored.append((LETTERS[i + 1], values[-1]))
        total = 0
        while values:
            total = (total + values.pop()) % 1000
            stored.append(("sum", total))
        return stored, spaced(total)

    @staticmethod
    def _header(writer: TraceWriter, phase: str, phase_at: int, count: int, count_from: int) -> int:
        """Write `# push d d` or `# pop d d`; return the position of the phase."""
        last = (writer.count_at, writer.count_at + 1)
        writer.write("#", *last, *((phase_at,) if phase_at else ()))
        at = writer.write(phase, *last, *((phase_at,) if phase_at else ()))
        writer.write_count(count, count_from)
        if phase_at:
            # The first pop, after a push, goes back to the count in the prompt.
            writer.uses += [(at + digit, source) for digit in (1, 2) for source in (phase_at, at)]
        return at
