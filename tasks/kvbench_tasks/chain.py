"""Chain: nodes with a pointer and a weight; a walk along the pointers adds up the weights."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from kvbench.core.task import Trace
from kvbench_tasks.reference_task import LETTERS, ReferenceTask, Size, Store, head, read_count, read_entries, spaced
from kvbench_tasks.trace_writer import TraceWriter, Value

_NODE = re.compile(r"([a-z]) -> ([a-z]) ([0-9]) ([0-9]) ([0-9]) ;")
_START = re.compile(r"start ([a-z]) ;")


class Chain(ReferenceTask):
    """`chain 0 6 : a -> c 1 2 3 ; b -> a 4 5 6 ; c -> b 7 8 9 ; sum 0 1 2 ; start b ; do`: six hops round the nodes.

    The nodes form one cycle. Each step adds the weight of its node to the sum and goes where the node points.
    The nodes must stay at hand to the end. The answer is the sum.
    """

    name: ClassVar[str] = "chain"
    sizes: ClassVar[Mapping[int, Size]] = MappingProxyType(
        {
            128: Size(1, 2),
            256: Size(2, 2),
            512: Size(6, 3),
            1024: Size(12, 5),
            2048: Size(24, 9),
            4096: Size(48, 17),
        }
    )

    def draw_prompt(self, rng: random.Random, size: Size) -> str:
        """Return a random prompt."""
        letters = LETTERS[: size.items]
        cycle = rng.sample(letters, len(letters))
        after = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        nodes = " ".join(f"{name} -> {after[name]} {spaced(rng.randrange(1000))} ;" for name in letters)
        total = spaced(rng.randrange(1000))
        return f"{head(self.name, size.steps)} {nodes} sum {total} ; start {rng.choice(letters)} ; do"

    def solve(self, prompt: str) -> Trace:
        """Return the reference solution; each step first writes down its node and where it points."""
        writer = TraceWriter(prompt)
        tokens = writer.tokens
        sum_at = tokens.index("sum")
        node_at = {tokens[at]: at for at in range(5, sum_at, 7)}
        total = writer.prompt_value(sum_at)
        next_at = sum_at + 6
        for _ in range(writer.count):
            writer.header()
            here_at = writer.copy(next_at)
            here = node_at[tokens[here_at]]
            writer.write("->")
            writer.look_up(here, here + 2)
            next_at = writer.copy(here + 2, here, here_at)
            weight = Value(tokens[here], "".join(tokens[here + 3 : here + 6]), here, here + 3)
            total = writer.add_and_store(total, (), weight, (here_at,))
        writer.begin_answer()
        writer.answer_digits(total)
        return writer.finish()

    def interpret(self, prompt: str) -> tuple[list[Store], str]:
        """Return what each step stores and the answer."""
        nodes = {name: (pointer, int(a + b + c)) for name, pointer, a, b, c in _NODE.findall(prompt)}
        total = read_entries(prompt)["sum"]
        node = _START.findall(prompt)[0]
        stored: list[Store] = []
        for _ in range(read_count(prompt)):
            node, weight = nodes[node]
            total = (total + weight) % 1000
            stored.append(("sum", total))
        return stored, spaced(total)
