"""Whether a program is right: what is right is known out here, or in another box, never where the program runs.

Standard library only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvbench_tasks.sandbox.box import Box, Limits, SandboxError
from kvbench_tasks.sandbox.guests.wire import encode


def passes_tests(
    program: str,
    tests: Sequence[tuple[Any, Any]],
    same: Callable[[Any, Any], bool],
    limits: Limits,
    seconds: float,
    entry: str | None = None,
    prelude: str = "",
) -> bool:
    """Whether a program gives the expected answer to each test; it stops at the first that it fails.

    Args:
        program: source.
        tests: pairs (input, expected): a standard input and what has to be printed, or the list of arguments and the
            value of `entry`.
        same: whether an answer is the expected one. It sees strings, or what JSON can hold and tuples.
        limits: of the box; `cpu` holds for each test.
        seconds: on the clock for each test.
        entry: function to call, or method of the class `Solution`.
        prelude: source that runs before the program, in its names.

    Raises:
        SandboxError: the box does not work.
    """
    # The process that forks one for each test may need some time for all of them.
    with Box(_source("program"), replace(limits, cpu=limits.cpu * (len(tests) + 1))) as box:
        if not _ready(box, prelude, program, entry, limits, seconds):
            return False
        for given, expected in tests:
            reply = box.ask({"input": given} if entry is None else {"args": encode(given)}, seconds)
            try:
                answer = reply["output"] if entry is None else plain(reply["value"])
                if not same(answer, expected):
                    return False
            except (TypeError, KeyError, ValueError, RecursionError):
                return False  # there was no answer, or none that could be an expected one
    return True


def passes_check(program: str, check: str, limits: Limits, seconds: float, entry: str, prelude: str = "") -> bool:
    """Whether the function `entry` of a program passes a check.

    Args:
        program: source that defines `entry`.
        check: source that defines `check(candidate)`, which raises if the candidate is wrong.
        limits: of both boxes; `cpu` holds for each call.
        seconds: on the clock for the whole check.
        entry: name of the function.
        prelude: source that runs before the program, in its names, and before the check, in its.

    Raises:
        SandboxError: the box does not work, or the check itself cannot be run.
    """
    end = time.monotonic() + seconds
    whole = replace(limits, cpu=math.ceil(seconds))
    with Box(_source("program"), whole) as box, Box(_source("checker"), whole) as checker:
        if not _ready(box, prelude, program, entry, limits, seconds):
            return False
        said = checker.ask({"entry": entry, "prelude": prelude, "check": check}, seconds)
        while isinstance(said, dict) and "args" in said:
            answer = box.ask(said, end - time.monotonic())
            if not isinstance(answer, dict) or "value" not in answer:
                return False
            said = checker.ask(answer, end - time.monotonic())
    if isinstance(said, dict) and "broken" in said:
        raise SandboxError(f"the check cannot be run: {said['broken']}")
    return bool(said == {"passed": True})


def plain(value: Any) -> Any:
    """A value as a box wrote it. No sets and no keys but strings: made by a stranger, they can take for ever to hash.

    Raises:
        ValueError, TypeError or RecursionError: it is something else.
    """
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, items),) = value.items()
    if name == "tuple":
        return tuple(plain(item) for item in items)
    if name == "dict" and all(isinstance(key, str) for key, _ in items):
        return {key: plain(item) for key, item in items}
    raise ValueError(name)


def _ready(box: Box, prelude: str, program: str, entry: str | None, limits: Limits, seconds: float) -> bool:
    first = {"prelude": prelude, "program": program, "entry": entry, "cpu": limits.cpu, "longest": limits.reply // 2}
    return bool(box.ask(first, seconds) == {"ready": True})


@cache
def _source(guest: str) -> str:
    """A guest with what it imports from beside it, as one text: a box has no folder of ours."""
    folder = Path(__file__).with_name("guests")
    wire = (folder / "wire.py").read_text(encoding="utf-8")
    own = (folder / f"{guest}.py").read_text(encoding="utf-8")
    return wire + own.replace("from kvbench_tasks.sandbox.guests.wire import decode, encode\n", "")
