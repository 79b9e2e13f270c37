"""AIME 2025: 30 problems of both papers; answers are whole numbers from 0 to 999."""

from __future__ import annotations

from typing import ClassVar

from kvbench.core.dataset import Source
from kvbench_tasks.math_task import MathTask


class Aime25(MathTask):
    """Columns of the hub: problem, answer, id. Other copies call the problem question."""

    name: ClassVar[str] = "aime25"
    hub: ClassVar[Source] = Source("math-ai/aime25")
    problem_columns: ClassVar[tuple[str, ...]] = ("problem", "Problem", "question")
    answer_columns: ClassVar[tuple[str, ...]] = ("answer", "Answer")
