"""GSM8K (Cobbe et al. 2021): 1319 word problems of the test split; answers are whole numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from kvbench.core.dataset import Source
from kvbench.core.errors import KvbenchError
from kvbench_tasks.math_task import MathTask


class Gsm8k(MathTask):
    """Columns: question, answer; the answer is a worked solution whose last line is `#### 1,234`."""

    name: ClassVar[str] = "gsm8k"
    hub: ClassVar[Source] = Source("openai/gsm8k", config="main")
    problem_columns: ClassVar[tuple[str, ...]] = ("question",)

    def gold(self, answer: Any, index: int) -> list[str]:
        """Return what stands behind `####`.

        Raises:
            KvbenchError: the answer has no such mark.
        """
        _, mark, final = str(answer).rpartition("####")
        if not mark:
            raise KvbenchError(f"Row {index + 1} of {self.rows.name} has no '####' in column 'answer'.")
        return super().gold(final, index)
