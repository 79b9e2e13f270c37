"""GPQA Diamond (Rein et al. 2023, arXiv:2311.12022): 198 questions of physics, chemistry and biology with four options each."""

from __future__ import annotations

import random
import re
from typing import ClassVar

from kvbench.core.dataset import Record, Source
from kvbench.core.task import DatasetTask, Grade, Problem, Split
from kvbench_tasks.math_answer import final_text

PROMPT = (
    "{question}\n\n{options}\n\nReason step by step, and put the letter of the right option (A, B, C or D) "
    "within \\boxed{{}} at the end."
)
LETTERS = "ABCD"

_WRAP = r"(?:\\(?:text|textbf|mathrm|mathbf|boldsymbol)\s*\{\s*)?"
_BOX = rf"\\+(?:boxed|fbox)\s*\{{\s*\$?{_WRAP}\(?([A-Da-d])\)?[.:]?\s*\}}?\$?\s*\}}"
_LINE = r"(?i:\banswer)[*_]*\s*(?:is\s*)?:[\s*_$(]*([A-D])(?=[)*_$]*\s*(?:[.,:;)]|\n|$))"
_ANSWER = re.compile(f"{_BOX}|{_LINE}")


class GpqaDiamond(DatasetTask):
    r"""Columns: Question, Correct Answer, Incorrect Answer 1 to 3; the hub calls its only split train.

    The order of the options is drawn from seed and question, and from nothing else. The answer is the last `\boxed{C}` or
    `Answer: C` outside reasoning blocks; anything else is no answer.
    """

    name: ClassVar[str] = "gpqa_diamond"
    chat: ClassVar[bool] = True
    hub: ClassVar[Source] = Source("Idavidrein/gpqa", config="gpqa_diamond", split="train", gated=True)

    def problems(self, gen_len: int, n: int, seed: int, split: Split = "eval") -> list[Problem]:
        asked = super().problems(gen_len, n, seed, split)
        return [self._shuffled(problem, index, seed) for index, problem in enumerate(asked)]

    def parse(self, record: Record, index: int) -> Problem:
        question = str(self.value(record, index, "Question")).strip()
        columns = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
        options = [str(self.value(record, index, column)).strip() for column in columns]
        return Problem(self.problem_id(index), question, options[0], tuple(("wrong", text) for text in options[1:]))

    def grade(self, problem: Problem, completion: str) -> Grade:
        found = [boxed.upper() or letter for boxed, letter in _ANSWER.findall(final_text(completion))]
        if not found:
            return Grade(0.0, None, finished=False)
        return Grade(float(found[-1] == problem.answer), None, finished=True, extracted=found[-1])

    def _shuffled(self, problem: Problem, index: int, seed: int) -> Problem:
        options = [problem.answer, *(str(text) for _, text in problem.meta)]
        order = list(range(len(options)))
        random.Random(f"{self.name}@{self.version}/{seed}/{problem.prompt}").shuffle(order)
        listed = "\n".join(f"{letter}) {options[place]}" for letter, place in zip(LETTERS, order, strict=True))
        return Problem(
            f"{self.name}@{self.version}/seed{seed}/{index}",
            PROMPT.format(question=problem.prompt, options=listed),
            LETTERS[order.index(0)],
        )
