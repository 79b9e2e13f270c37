"""LiveCodeBench (Jain et al. 2024, arXiv:2403.07974): the 175 problems that release v6 added, contests of early 2025."""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar

from kvbench.core.dataset import Record, Source
from kvbench.core.errors import KvbenchError
from kvbench_tasks.program_task import ProgramTask
from kvbench_tasks.sandbox.box import Limits
from kvbench_tasks.sandbox.judge import passes_tests

PROMPT = "Solve this problem with a Python program.\n\n### Problem\n{content}\n\n### Format\n{form}\n\n```python\n{code}\n```"
STDIN = (
    "Read the input from standard input and print the answer to standard output. Give the program in one block of code:"
)
FUNCTIONAL = "Complete this code and give all of it in one block of code:"

# LiveCodeBench gives each test 6 seconds on the clock and 4 GB; here they are processor time.
_LIMITS = Limits(cpu=6, memory=4 << 30, disk=256 << 20, reply=64 << 20)
_SECONDS = 15.0
_LARGEST = 1 << 30

# What LiveCodeBench imports before each program; the later ones win.
_MODULES = (
    "string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, operator, io, "
    "sys, json"
)
_PRELUDE = "\n".join(
    [
        *(f"from {name} import *" for name in [*_MODULES.split(", "), "builtins", "typing"]),
        f"import {_MODULES}",
        "sys.setrecursionlimit(50000)",
    ]
)

Test = tuple[Any, Any]
"""Standard input and output; or arguments and value."""


class LivecodebenchV6(ProgramTask):
    """Columns: question_content, starter_code, public_test_cases, private_test_cases, metadata, and facts about the contest.

    Both sets of tests count. The private ones are JSON, or JSON in a pickle in zlib in base64.
    """

    name: ClassVar[str] = "livecodebench_v6"
    # The repository's script gathers files by release, and `datasets` runs no scripts any more: v6 alone is this file.
    hub: ClassVar[Source] = Source("livecodebench/code_generation_lite", config="v6", files=("test6.jsonl",))

    def prompt(self, record: Record, index: int) -> str:
        starter = record.get("starter_code") or ""
        return PROMPT.format(
            content=str(self.value(record, index, "question_content")).strip(),
            form=FUNCTIONAL if starter else STDIN,
            code=str(starter).rstrip() or "# your program",
        )

    def check_tests(self, record: Record, index: int) -> None:
        self._tests(record, index)

    def passes(self, program: str, record: Record, index: int) -> bool:
        entry, tests = self._tests(record, index)
        same = same_output if entry is None else same_value
        return passes_tests(program, tests, same, _LIMITS, _SECONDS, entry, _PRELUDE)

    def _tests(self, record: Record, index: int) -> tuple[str | None, list[Test]]:
        """The function to call, if there is one, and all tests."""
        column = "metadata"
        try:
            entry = (json.loads(record.get(column) or "{}") or {}).get("func_name")
            cases = []
            for column in ("public_test_cases", "private_test_cases"):
                cases += read_cases(str(self.value(record, index, column)))
            tests = [_test(case, entry) for case in cases]
        except (ValueError, TypeError, KeyError, AttributeError, zlib.error, RecursionError) as error:
            raise KvbenchError(
                f"Row {index + 1} of {self.rows.name} cannot be read in column '{column}': {str(error)[:200]}."
            ) from error
        if not tests:
            raise KvbenchError(f"Row {index + 1} of {self.rows.name} has no tests.")
        return entry, tests


def read_cases(text: str) -> list[Any]:
    """Read a column of test cases.

    Raises:
        ValueError or zlib.error: it is neither JSON nor packed JSON.
    """
    if not text.lstrip().startswith("["):
        packed = zlib.decompressobj()
        data = packed.decompress(base64.b64decode(text, validate=True), _LARGEST)
        if not packed.eof:
            raise ValueError(f"it does not end within {_LARGEST} bytes")
        text = pickled_text(data)
    cases = json.loads(text)
    if not isinstance(cases, list):
        raise ValueError("it is not a list")  # noqa: TRY004 - one error for everything that cannot be read
    return cases


def pickled_text(data: bytes) -> str:
    """Return the string in a pickle that holds nothing else. The pickle is read, never run: no object is ever made.

    Raises:
        ValueError: the pickle holds something else.
    """
    texts = []
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}:
            texts.append(argument)
        elif operation.name not in {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}:
            raise ValueError(f"a pickle with {operation.name} is not a string")
    if len(texts) != 1:
        raise ValueError(f"a pickle of {len(texts)} strings")
    return str(texts[0])


def same_output(said: str, expected: str) -> bool:
    """Whether two outputs agree line by line, spaces at the ends aside; as numbers where a line has only numbers.

    Numbers are decimal and have to be equal: LiveCodeBench has no tolerance.
    """
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (said, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_value(said: Any, expected: Any) -> bool:
    """Whether a function's value is the expected one. LiveCodeBench takes a tuple for a list, but not inside another."""
    return bool((list(said) if isinstance(said, tuple) else said) == expected)


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    try:
        return [Decimal(word) for word in ours.split()] == [Decimal(word) for word in theirs.split()]
    except InvalidOperation:  # a word, or a signalling NaN
        return False


def _test(case: Any, entry: str | None) -> Test:
    given, expected = str(case["input"]), str(case["output"])
    if (case["testtype"] == "functional") != (entry is not None):
        raise ValueError(f"a test of type {case['testtype']!r} for {'a function' if entry else 'a program'}")
    return (
        (given, expected)
        if entry is None
        else ([json.loads(line) for line in given.split("\n") if line.strip()], json.loads(expected))
    )
