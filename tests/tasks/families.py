"""What the tests of the reference tasks share: the families, and a reader that checks every line of a solution."""

from __future__ import annotations

from itertools import pairwise

from kvbench_tasks.chain import Chain
from kvbench_tasks.codebook import Codebook
from kvbench_tasks.ledger import Ledger
from kvbench_tasks.program import Program
from kvbench_tasks.recurrence import Recurrence
from kvbench_tasks.reference_task import ReferenceTask, Store
from kvbench_tasks.stack import Stack

FAMILIES: tuple[ReferenceTask, ...] = (Recurrence(), Codebook(), Ledger(), Program(), Chain(), Stack())

PROBLEMS = {128: 40, 256: 40, 512: 30, 1024: 15, 2048: 8, 4096: 4}
"""How many problems of each level a test goes through."""


def words(text: str) -> list[str]:
    """The words of a text that is written over several lines."""
    return text.split()


def check_hand_written(task: ReferenceTask, prompt: str, solution: str, stored: list[Store], answer: str) -> None:
    """The interpreter and the solution, word by word, are what was worked out by hand."""
    assert task.interpret(prompt) == (stored, answer)
    trace = task.solve(prompt)
    assert trace.tokens == words(prompt) + words(solution)
    assert trace.prompt_len == len(words(prompt))
    assert read_solution(trace.tokens[trace.prompt_len :]) == (stored, answer)


def read_solution(tokens: list[str]) -> tuple[list[Store], str]:
    """Reads a completion line by line, checks all of its arithmetic with whole numbers, and returns what it says.

    Written against the format in docs/reference_tasks.md; shares nothing with the tasks.
    """
    end = tokens.index("answer")
    assert tokens[-1] == "<eos>"
    steps: list[list[str]] = []
    for token in tokens[:end]:
        if token == "#":
            steps.append([])
        steps[-1].append(token)
    return [_read_step(step) for step in steps], " ".join(tokens[end + 1 : -1])


def _read_step(step: list[str]) -> Store:
    lines = _lines(step)
    operands, additions, check, subtractions, store = lines[0], lines[1:4], lines[4], lines[5:8], lines[8]
    assert len(lines) == 9
    plus = operands.index("+")
    x, y = _number(operands[plus - 3 : plus]), _number(operands[plus + 2 :])
    assert len(operands) == plus + 5
    z = (x + y) % 1000
    _check_columns(additions, x, y, sign=1)
    assert (check[3], _number(check[:3]), _number(check[4:])) == ("-", z, y)
    _check_columns(subtractions, z, y, sign=-1)
    assert store[1] == "="
    assert _number(store[2:]) == z
    return store[0], z


def _check_columns(columns: list[list[str]], x: int, y: int, sign: int) -> None:
    """Columns from the lowest digit up: digit, digit, carry or borrow, `=`, the next carry or borrow, digit."""
    carry = 0
    for power, column in enumerate(columns):
        a, b = x // 10**power % 10, y // 10**power % 10
        total = a + sign * (b + carry)
        operator = "+" if sign > 0 else "-"
        assert column[:6] == [str(a), operator, str(b), operator, str(carry), "="], column
        carry = int(not 0 <= total <= 9)
        assert column[6:] == [str(carry), str(total % 10)], column


def _lines(step: list[str]) -> list[list[str]]:
    ends = [-1, *(at for at, word in enumerate(step) if word == ";")]
    assert ends[-1] == len(step) - 1
    return [step[start + 1 : stop] for start, stop in pairwise(ends)]


def _number(digits: list[str]) -> int:
    assert len(digits) == 3
    assert all(len(digit) == 1 for digit in digits)
    return int("".join(digits))
