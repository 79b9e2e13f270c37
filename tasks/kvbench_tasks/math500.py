"""MATH-500: 500 problems of the MATH test set, chosen by Lightman et al. 2023; answers are expressions."""

from __future__ import annotations

from typing import ClassVar

from kvbench.core.dataset import Source
from kvbench_tasks.math_task import MathTask


class Math500(MathTask):
    """Columns: problem, solution, answer, subject, level, unique_id."""

    name: ClassVar[str] = "math500"
    hub: ClassVar[Source] = Source("HuggingFaceH4/MATH-500")
