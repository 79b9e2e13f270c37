"""What the mathematical tasks share: the prompt, the gold answer, and grading the last box of a completion."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from typing import Any, ClassVar

from kvbench.core.dataset import Record, Rows
from kvbench.core.errors import KvbenchError
from kvbench.core.task import DatasetTask, Grade, Problem
from kvbench_tasks.math_answer import final_text, last_box, take_apart
from kvbench_tasks.math_equality import LONGEST, Equality

PROMPT = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."

_LIST_AS_TEXT = re.compile(r"\[\s*(['\"]).*\1\s*\]", re.DOTALL)


class MathTask(DatasetTask):
    r"""Problems with a final answer; zero-shot; the last complete `\boxed{}` outside reasoning blocks is what counts.

    Attributes:
        problem_columns, answer_columns: where copies of the data set keep problem and answer, the hub's own name first.
    """

    chat: ClassVar[bool] = True
    problem_columns: ClassVar[tuple[str, ...]] = ("problem",)
    answer_columns: ClassVar[tuple[str, ...]] = ("answer",)

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self._equality = Equality()

    @classmethod
    def unavailable(cls) -> str | None:
        if find_spec("math_verify") is None:
            return "It needs the package 'math-verify'; pip install 'kvbench[tasks]'."
        return None

    def parse(self, record: Record, index: int) -> Problem:
        problem = str(self.value(record, index, *self.problem_columns)).strip()
        first, *others = self.gold(self.value(record, index, *self.answer_columns), index)
        return Problem(
            self.problem_id(index), PROMPT.format(problem=problem), first, tuple(("or", other) for other in others)
        )

    def gold(self, answer: Any, index: int) -> list[str]:
        """Return the writings of the right answer, one of which is enough; a list is a list of them, as text too.

        Raises:
            KvbenchError: there is none.
        """
        if isinstance(answer, str) and _LIST_AS_TEXT.fullmatch(answer.strip()):
            answer = _read_list(answer)
        several = answer if isinstance(answer, list | tuple) else [answer]
        texts = [last_box(text) or text for text in (_as_text(one).strip() for one in several) if text]
        if not texts:
            raise KvbenchError(f"Row {index + 1} of {self.rows.name} has an empty answer.")
        return texts

    def grade(self, problem: Problem, completion: str) -> Grade:
        answer = last_box(final_text(completion))
        if answer is None or not answer.strip():
            return Grade(0.0, None, finished=False)
        golds = [problem.answer, *(str(text) for name, text in problem.meta if name == "or")]
        right = any(self._equality.same(gold, answer) for gold in golds)
        # A key has to stay short and be made without effort.
        key = take_apart(answer).key if len(answer) <= LONGEST else answer[:LONGEST]
        return Grade(float(right), None, finished=True, extracted=key)


def _as_text(answer: Any) -> str:
    """A number as people write it: data sets that went through pandas have 33.0 for 33."""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def _read_list(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError):
        return text
