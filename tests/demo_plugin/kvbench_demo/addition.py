"""A task of a third party: one addition, in words that the reference model knows."""

from __future__ import annotations

import random
from typing import ClassVar

from kvbench.core.errors import KvbenchError
from kvbench.core.task import Grade, Problem, Split, Task

GEN_LEN = 128


class DemoAddition(Task):
    """`recurrence 0 1 b : a 8 4 7 ; b 3 8 5 ; do` asks for 847 + 385 modulo 1000; the model's answer ends `answer 2 3 2`."""

    name: ClassVar[str] = "demo_addition"
    levels: ClassVar[tuple[int, ...]] = (GEN_LEN,)

    def problems(self, gen_len: int, n: int, seed: int, split: Split = "eval") -> list[Problem]:
        if gen_len != GEN_LEN:
            raise KvbenchError(
                f"Task '{self.name}' has no problems of generation length {gen_len}; choose from {GEN_LEN}."
            )
        return [self._problem(seed, index, split) for index in range(n)]

    def longest_prompt(self, gen_len: int) -> int:
        return 17

    def grade(self, problem: Problem, completion: str) -> Grade:
        _, answered, given = completion.partition("answer ")
        right = float(given.strip() == problem.answer)
        return Grade(exact=right, steps_correct=right, finished=bool(answered))

    def _problem(self, seed: int, index: int, split: Split) -> Problem:
        rng = random.Random(f"{self.name}@{self.version}/{split}/{seed}/{index}")
        # Even first numbers are for evaluation, odd ones for training: the two never meet, whatever the seeds.
        first = 2 * rng.randrange(500) + (split == "train")
        second = rng.randrange(1000)
        prompt = f"<bos> recurrence 0 1 b : a {_spelled(first)} ; b {_spelled(second)} ; do"
        answer = _spelled((first + second) % 1000)
        return Problem(f"{self.name}@{self.version}/{GEN_LEN}/{split}{seed}/{index}", prompt, answer)


def _spelled(number: int) -> str:
    return " ".join(f"{number:03}")
