"""AIME 2024: 30 problems of both papers; answers are whole numbers from 0 to 999."""

from __future__ import annotations

from typing import ClassVar

from kvbench.core.dataset import Source
from kvbench_tasks.math_task import MathTask


class Aime24(MathTask):
    r"""Columns of the hub: id, problem, solution (`\boxed{204}`), url. Other copies call the answer so, or Answer."""

    name: ClassVar[str] = "aime24"
    hub: ClassVar[Source] = Source("math-ai/aime24")
    problem_columns: ClassVar[tuple[str, ...]] = ("problem", "Problem", "question")
    # Copies with a column for the answer have the whole way to it in `solution`.
    answer_columns: ClassVar[tuple[str, ...]] = ("answer", "Answer", "solution")
