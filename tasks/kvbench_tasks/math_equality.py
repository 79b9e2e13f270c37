"""Whether two answers are equal: by spelling, by value, by members, and last by math-verify in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence

from kvbench.core.errors import KvbenchError
from kvbench_tasks.math_answer import Answer, is_decimal, spelled, take_apart, value

LONGEST = 1000
"""Characters of an answer; a longer one is wrong unread."""

_MOST_MEMBERS = 40
_START_SECONDS = 120.0
_SECONDS = 10.0
# Lists come without brackets, in braces and, for several solutions, in round ones; tuples may have lost theirs.
_WRITTEN_AS = {",": {",", "{}", "()"}, "{}": {"{}", ","}, "()": {"()", ","}}


class Equality:
    """Compares answers with a gold answer. Its child process starts when it is first needed and is killed when late.

    Args:
        seconds: for one comparison of expressions.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._known: dict[tuple[str, str], bool] = {}

    def same(self, gold: str, given: str) -> bool:
        """Whether `given` is the answer `gold`."""
        if len(given) > LONGEST:
            return False
        wanted = take_apart(gold)
        found = take_apart(given, thousands=not wanted.kind)
        if wanted.key == found.key:
            return True
        if wanted.kind and found.kind:
            return self._same_members(wanted, found)
        if wanted.kind or found.kind:
            # `\pm 3` is a list, `0 < x < 1` is an interval: only the expressions tell.
            return self._same_expressions(gold, given)
        return self._same_part(wanted.parts[0], found.parts[0])

    def _same_members(self, wanted: Answer, found: Answer) -> bool:
        if len(found.parts) > _MOST_MEMBERS or len(wanted.parts) != len(found.parts):
            return False
        if found.kind not in _WRITTEN_AS.get(wanted.kind, {wanted.kind}):
            return False
        if wanted.kind in {",", "{}"}:
            return self._same_sets(wanted.parts, list(found.parts))
        return all(self.same(*pair) for pair in zip(wanted.parts, found.parts, strict=True))

    def _same_sets(self, wanted: Sequence[str], found: list[str]) -> bool:
        for part in wanted:
            match = next((other for other in found if self.same(part, other)), None)
            if match is None:
                return False
            found.remove(match)
        return True

    def _same_part(self, wanted: str, found: str) -> bool:
        if "=" in found and "=" not in wanted:
            found = found.rpartition("=")[2]
        wanted, found = spelled(wanted), spelled(found)
        if wanted == found or not found:
            return bool(found)
        theirs = value(found)
        if theirs is not None and value(wanted) == theirs:
            return True
        if is_decimal(wanted) and is_decimal(found):
            return False
        return self._same_expressions(wanted, found)

    def _same_expressions(self, wanted: str, found: str) -> bool:
        """Ask the child, once for each pair; what it cannot say in time, or dies of, is not equal."""
        pair = (wanted, found)
        if pair not in self._known:
            answer = self._asked(pair)
            # Whatever ended the first child may have had nothing to do with this pair.
            self._known[pair] = bool(self._asked(pair) if answer is None else answer)
        return self._known[pair]

    def _asked(self, pair: tuple[str, str]) -> bool | None:
        """What the child says; False when it is late, None when it died."""
        if self._child is None:
            self._child = self._started()
        answer = _exchange(self._child, json.dumps(pair).encode() + b"\n", self._seconds)
        if answer:
            return answer == b"same\n"
        _end(self._child)
        self._child = None
        return False if answer is None else None

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "kvbench_tasks.math_child", str(int(self._seconds) + 2)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, child)
        if _exchange(child, b"", _START_SECONDS) != b"ready\n":
            _end(child)
            raise KvbenchError("The process that compares expressions did not start; 'kvbench doctor' shows versions.")
        return child


def _exchange(child: subprocess.Popen[bytes], request: bytes, seconds: float) -> bytes | None:
    """Send a line and wait for one; None when the child is late, nothing when it died."""
    assert child.stdin is not None
    assert child.stdout is not None
    limit = time.monotonic() + seconds
    try:
        child.stdin.write(request)
        child.stdin.flush()
    except BrokenPipeError:
        return b""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, limit - time.monotonic())):
                return None
            piece = os.read(child.stdout.fileno(), 64)
            if not piece:
                return b""
            line += piece
    return line


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
