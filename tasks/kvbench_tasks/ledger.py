"""Ledger: accounts posted into each other; the last digit of what was stored says which account is next."""

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


class Ledger(ReferenceTask):
    """`ledger 0 6 c : a 1 2 3 ; b 4 5 6 ; c 7 8 9 ; start 3 4 5 ; do`: six postings to three accounts.

    Account j of m is chosen when the last digit of the previous stored value is j modulo m; the previous value
    is added to it. The answer is the balance of every account, so each must be kept however long it rested.
    """

    name: ClassVar[str] = "ledger"
    held_out: ClassVar[bool] = True
    sizes: ClassVar[Mapping[int, Size]] = MappingProxyType(
        {
            128: Size(1, 2),
            256: Size(2, 3),
            512: Size(6, 3),
            1024: Size(11, 10),
            2048: Size(24, 10),
            4096: Size(49, 10),
        }
    )

    def draw_prompt(self, rng: random.Random, size: Size) -> str:
        """Return a random prompt."""
        letters = LETTERS[: size.items]
        start = spaced(rng.randrange(1000))
        return f"{head(self.name, size.steps, letters[-1])} {entries(rng, letters)} start {start} ; do"

    def solve(self, prompt: str) -> Trace:
        """Return the reference solution; each header repeats the last account, which tells the modulus."""
        writer = TraceWriter(prompt)
        accounts = writer.prompt_values(first_at=6)
        previous = accounts.pop("start")
        names = list(accounts)
        size_at = 4
        for _ in range(writer.count):
            writer.header()
            size_at = writer.copy(size_at)
            name = names[int(previous.digits[2]) % len(names)]
            chosen_by = (previous.digits_at + 2, size_at)
            previous = writer.add_and_store(accounts[name], chosen_by, previous, (previous.name_at,))
            accounts[name] = previous
        writer.begin_answer()
        listed: tuple[int, ...] = ()
        for name in names:
            name_at = writer.write(name, *listed)
            writer.answer_digits(accounts[name], name_at)
            # The next letter, or the end of the list, follows from this letter and the last one of the accounts.
            listed = (name_at, size_at)
        writer.uses += [(len(writer.tokens), source) for source in listed]
        return writer.finish()

    def interpret(self, prompt: str) -> tuple[list[Store], str]:
        """Return what each step stores and the answer."""
        accounts = read_entries(prompt)
        value = accounts.pop("start")
        names = list(accounts)
        stored: list[Store] = []
        for _ in range(read_count(prompt)):
            name = names[value % 10 % len(names)]
            value = (accounts[name] + value) % 1000
            accounts[name] = value
            stored.append((name, value))
        return stored, " ".join(f"{name} {spaced(balance)}" for name, balance in accounts.items())
