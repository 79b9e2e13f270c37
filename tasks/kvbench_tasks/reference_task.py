"""What the reference tasks share: levels, generation, splits, and grading against an independent interpreter."""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from kvbench.core.errors import KvbenchError
from kvbench.core.task import Grade, Problem, Split, Trace, TracedTask
from kvbench_tasks.vocabulary import EOS

LEVELS = (128, 256, 512, 1024, 2048, 4096)
"""Generation lengths. 512 and up are scored; the two short ones serve training and smoke tests."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"

Store = tuple[str, int]
"""A stored result: name and value."""

_STORE = re.compile(r"(?<!\S)([a-z]|sum) = ([0-9]) ([0-9]) ([0-9]) ;(?!\S)")
_ENTRY = re.compile(r"(?<!\S)([a-z]+) ([0-9]) ([0-9]) ([0-9]) ;(?!\S)")
_HEAD = re.compile(r"<bos> [a-z]+ ([0-9]) ([0-9])(?!\S)")

# One prompt in eight belongs to the evaluation split, whatever seed it was drawn with.
_EVAL_SHARE = 8


@dataclass(frozen=True, slots=True)
class Size:
    """How large the problems of one level are.

    Attributes:
        steps: additions in the solution.
        items: registers, table entries, accounts or nodes.
    """

    steps: int
    items: int


class ReferenceTask(TracedTask):
    """A family of generated problems that a person can read.

    A family says how to draw a prompt, how to write the reference solution (`solve`), and, by itself and on whole
    numbers, what the prompt means (`interpret`). Grades come from the interpreter alone.
    """

    levels: ClassVar[tuple[int, ...]] = LEVELS
    sizes: ClassVar[Mapping[int, Size]]

    @abstractmethod
    def draw_prompt(self, rng: random.Random, size: Size) -> str:
        """Return a random prompt."""

    @abstractmethod
    def solve(self, prompt: str) -> Trace:
        """Return the reference solution of a prompt."""

    @abstractmethod
    def interpret(self, prompt: str) -> tuple[list[Store], str]:
        """Return what each step stores and the answer, computed from the text of the prompt."""

    def problems(self, gen_len: int, n: int, seed: int, split: Split = "eval") -> list[Problem]:
        """Return the first `n` problems of a level."""
        return [self.problem(gen_len, i, seed, split) for i in range(n)]

    def problem(self, gen_len: int, index: int, seed: int, split: Split = "eval") -> Problem:
        """Return one problem of a level."""
        size = self.size(gen_len)
        key = f"{self.name}@{self.version}/{split}/{gen_len}/{seed}/{index}"
        rng = random.Random(hashlib.sha256(key.encode()).digest())
        prompt = self.draw_prompt(rng, size)
        while _split_of(prompt) != split:
            prompt = self.draw_prompt(rng, size)
        place = f"seed{seed}" if split == "eval" else f"{split}-seed{seed}"
        answer = self.interpret(prompt)[1]
        meta = (("steps", size.steps), ("items", size.items))
        return Problem(f"{self.name}@{self.version}/{gen_len}/{place}/{index}", prompt, answer, meta)

    def size(self, gen_len: int) -> Size:
        """Return the size of a level's problems.

        Raises:
            KvbenchError: the task has no such level.
        """
        if gen_len not in self.sizes:
            known = ", ".join(map(str, self.levels))
            raise KvbenchError(
                f"Task '{self.name}' has no problems of generation length {gen_len}; choose from {known}."
            )
        return self.sizes[gen_len]

    def longest_prompt(self, gen_len: int) -> int:
        """Return how many tokens the prompts of a level have; they all have the same number."""
        return _prompt_length(type(self), gen_len)

    def trace(self, problem: Problem) -> Trace:
        """Return the reference solution of a problem."""
        return self.solve(problem.prompt)

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Grade a completion by its stored results, in order, and by what follows `answer`."""
        words = completion.split()
        ended = EOS in words
        words = words[: words.index(EOS)] if ended else words
        expected, answer = self.interpret(problem.prompt)
        text = " ".join(words)
        stored = [(name, int(a + b + c)) for name, a, b, c in _STORE.findall(text)]
        correct = 0
        for right, found in zip(expected, stored, strict=False):
            if right != found:
                break
            correct += 1
        given = words[words.index("answer") + 1 :] if "answer" in words else None
        finished = given is not None and (ended or len(given) >= len(answer.split()))
        return Grade(float(given == answer.split()), correct / len(expected), finished)


def _split_of(prompt: str) -> Split:
    """Return the split that a prompt belongs to.

    Small levels have so few problems that two seeds would draw the same one; a prompt therefore decides its own split.
    """
    return "eval" if zlib.crc32(prompt.encode()) % _EVAL_SHARE == 0 else "train"


@cache
def _prompt_length(task: type[ReferenceTask], gen_len: int) -> int:
    return len(task().problem(gen_len, 0, 0).prompt.split())


# ---- writing prompts


def head(family: str, count: int, *more: str) -> str:
    """Return the start of a prompt: `<bos> family d d ... :`."""
    return " ".join(("<bos>", family, *f"{count:02d}", *more, ":"))


def spaced(value: int) -> str:
    """Return a number as three digits, one word each."""
    return " ".join(f"{value:03d}")


def entries(rng: random.Random, names: str) -> str:
    """Return an entry `name d d d ;` with a random number for each name."""
    return " ".join(f"{name} {spaced(rng.randrange(1000))} ;" for name in names)


# ---- reading prompts, for interpreters only


def read_count(prompt: str) -> int:
    """Return the two-digit count of a prompt."""
    match = _HEAD.match(prompt)
    if match is None:
        raise KvbenchError(f"This is not the prompt of a reference task: {prompt[:60]!r}.")
    return int(match[1] + match[2])


def read_entries(text: str) -> dict[str, int]:
    """Return the numbers in a text by name, in the order they stand there."""
    return {name: int(a + b + c) for name, a, b, c in _ENTRY.findall(text)}
