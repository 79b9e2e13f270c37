"""HMMT February 2025: 30 problems of the Harvard-MIT Mathematics Tournament; answers are expressions."""

from __future__ import annotations

from typing import ClassVar

from kvbench.core.dataset import Source
from kvbench_tasks.math_task import MathTask


class HmmtFeb25(MathTask):
    """Columns: problem_idx, problem, answer, problem_type; the hub calls its only split train."""

    name: ClassVar[str] = "hmmt_feb25"
    hub: ClassVar[Source] = Source("MathArena/hmmt_feb_2025", split="train")
