"""What the tasks share whose answers are programs: a block of code is run in a sandbox and has to pass tests."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from kvbench.core.dataset import Record
from kvbench.core.errors import KvbenchError
from kvbench.core.task import DatasetTask, Grade, Problem
from kvbench_tasks.code_block import last_code_block
from kvbench_tasks.math_answer import final_text
from kvbench_tasks.sandbox.box import SandboxError, unavailable


class ProgramTask(DatasetTask):
    """Zero-shot; the last Python block outside reasoning blocks is what counts. Programs have no votes: none is extracted."""

    chat: ClassVar[bool] = True
    grades_apart: ClassVar[bool] = True

    @classmethod
    def unavailable(cls) -> str | None:
        reason = unavailable()
        if reason is None:
            return None
        return f"It runs programs that a model wrote, in a sandbox that cannot be made on this machine: {reason}."

    def parse(self, record: Record, index: int) -> Problem:
        self.check_tests(record, index)
        return Problem(self.problem_id(index), self.prompt(record, index), "", (("row", index),))

    def grade(self, problem: Problem, completion: str) -> Grade:
        program = last_code_block(final_text(completion))
        if program is None:
            return Grade(0.0, None, finished=False)
        index = int(dict(problem.meta)["row"])
        try:
            try:
                passed = self.passes(program, self.rows[index], index)
            except SandboxError:
                passed = self.passes(program, self.rows[index], index)  # a machine under load may refuse a process once
        except SandboxError as error:
            raise KvbenchError(f"The sandbox does not work: {error}.") from error
        return Grade(float(passed), None, finished=True)

    @abstractmethod
    def prompt(self, record: Record, index: int) -> str:
        """Return the user's message."""

    @abstractmethod
    def check_tests(self, record: Record, index: int) -> None:
        """Read the tests of a record, before anything is generated.

        Raises:
            KvbenchError: it has none, or they are damaged.
        """

    @abstractmethod
    def passes(self, program: str, record: Record, index: int) -> bool:
        """Run a program on the tests of a record.

        Raises:
            SandboxError: the sandbox does not work.
        """
