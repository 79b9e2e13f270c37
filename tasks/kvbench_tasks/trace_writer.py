"""Writes a reference solution word by word and records which earlier words each one was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.core.task import Trace
from kvbench_tasks.arithmetic import WORKING, spelled_out_sum, working_uses
from kvbench_tasks.vocabulary import EOS


@dataclass(frozen=True, slots=True)
class Value:
    """A number as it stands in the text.

    Attributes:
        name: the word it is known by.
        digits: its three digits.
        name_at: position of the name.
        digits_at: position of the first digit.
    """

    name: str
    digits: str
    name_at: int
    digits_at: int


def zero(name: str) -> Value:
    """Return a number that starts at 0 0 0 without standing in the prompt."""
    return Value(name, "000", -1, -1)


# `X 1 2 3 + Y 7 8 9 ;` stands before the working, `Z = 9 1 2 ;` after it.
_OPERANDS = 10
_STORE = 6
_WORKING_USES = tuple(working_uses(x_at=1 - _OPERANDS, y_at=6 - _OPERANDS))
_CHECKED_AT = 27  # the three digits of the result in the check, relative to the working

STEP = _OPERANDS + WORKING + _STORE
"""Words of one step without its header."""


class TraceWriter:
    """Appends to a prompt; every method says what the words it writes depend on.

    Attributes:
        tokens: everything written so far, the prompt included.
        count: the number in the last header, at first the one in the prompt.
        count_at: its position.
    """

    def __init__(self, prompt: str, count_at: int = 2) -> None:
        self.tokens = prompt.split(" ")
        self.prompt_len = len(self.tokens)
        self.uses: list[tuple[int, int]] = []
        self.reaches: list[int] = []
        self._copied_until: dict[int, int] = {}
        self._in_step: list[int] = []
        self.count_at = count_at
        self.count = int(self.tokens[count_at] + self.tokens[count_at + 1])

    def prompt_value(self, name_at: int) -> Value:
        """Return the number whose entry `name d d d` in the prompt starts at `name_at`."""
        return Value(self.tokens[name_at], "".join(self.tokens[name_at + 1 : name_at + 4]), name_at, name_at + 1)

    def prompt_values(self, first_at: int) -> dict[str, Value]:
        """Return the numbers of consecutive entries `name d d d ;` by name."""
        values = {}
        at = first_at
        while at + 4 < self.prompt_len and self.tokens[at + 1].isdigit() and self.tokens[at + 4] == ";":
            values[self.tokens[at]] = self.prompt_value(at)
            at += 5
        return values

    def write(self, word: str, *sources: int) -> int:
        """Write one word made from the words at `sources`; return its position."""
        position = len(self.tokens)
        self.tokens.append(word)
        for source in sources:
            self.uses.append((position, source))
        return position

    def header(self) -> None:
        """Write `# d d`, the last count less one."""
        self.write("#", self.count_at, self.count_at + 1)
        self.write_count(self.count - 1, self.count_at)

    def write_count(self, count: int, source: int) -> None:
        """Write a two-digit count that follows from the one at `source`."""
        tens, ones = map(str, divmod(count, 10))
        at = self.write(tens, source, source + 1)
        self.write(ones, source + 1)
        self.count, self.count_at = count, at

    def copy(self, source: int, *more: int) -> int:
        """Write the word at `source` again; return its new position."""
        return self.write(self.tokens[source], source, *more)

    def look_up(self, original: int, end: int) -> None:
        """Note that the words from `original` to `end`, or any later copy of them, are needed for the next word.

        Everything that a step looks up counts as copied until the end of that step.
        """
        self.reaches.append(len(self.tokens) - self._copied_until.get(original, end))
        self._in_step.append(original)

    def fetch(self, value: Value, *chosen_by: int) -> int:
        """Write a number's name, which follows from the words at `chosen_by`, and look up its digits there."""
        position = len(self.tokens)
        if value.name_at >= 0:
            self.look_up(value.digits_at, value.digits_at + 2)
            self.uses.append((position + 1, value.name_at))
            self.uses += [(position + 1 + i, value.digits_at + i) for i in range(3)]
        self.tokens += (value.name, *value.digits)
        self.uses += [(position, source) for source in chosen_by]
        return position

    def add_and_store(
        self,
        x: Value,
        x_chosen_by: Sequence[int],
        y: Value,
        y_chosen_by: Sequence[int] | None = None,
        name: str | None = None,
        name_at: int | None = None,
    ) -> Value:
        """Write one whole addition and return its stored result.

        Args:
            x: first number.
            x_chosen_by: positions of the words that say it has to be this one.
            y: second number.
            y_chosen_by: the same for the second; by default the first digit of x.
            name: name of the result; by default that of x.
            name_at: where that name can be read; by default in this step's operands.
        """
        x_at = self.fetch(x, *x_chosen_by)
        self.write("+")
        self.fetch(y, *((x_at + 1,) if y_chosen_by is None else y_chosen_by))
        self.write(";")
        at = len(self.tokens)
        working, z = spelled_out_sum(x.digits, y.digits)
        self.tokens += working
        self.uses += [(at + use, at + source) for use, source in _WORKING_USES]
        # A family that sums up stores nothing but `sum`; other names follow from the operands or from elsewhere.
        sources = () if x.name == "sum" else (x_at if name_at is None else name_at,)
        stored_at = self.write(name or x.name, *sources)
        self.write("=")
        digits_at = len(self.tokens)
        self.tokens += (*z, ";")
        self.uses += [(digits_at + i, at + _CHECKED_AT + i) for i in range(3)]
        self._copied_until.update(dict.fromkeys(self._in_step, len(self.tokens)))
        self._in_step.clear()
        return Value(name or x.name, z, stored_at, digits_at)

    def begin_answer(self, *more: int) -> None:
        """Write `answer`, which follows from a count that has run out and from the words at `more`."""
        self.write("answer", self.count_at, self.count_at + 1, *more)

    def answer_digits(self, value: Value, *chosen_by: int) -> None:
        """Write the three digits of a number."""
        self.look_up(value.digits_at, value.digits_at + 2)
        at = len(self.tokens)
        self.tokens += value.digits
        self.uses += [(at, source) for source in (value.name_at, *chosen_by)]
        self.uses += [(at + i, value.digits_at + i) for i in range(3)]

    def finish(self) -> Trace:
        """Write `<eos>` and return the trace."""
        self.write(EOS)
        return Trace(self.tokens, self.prompt_len, self.uses, self.reaches)
