"""Tasks of lm-eval as tasks of kvbench, `lm_eval:NAME`: lm-eval makes the requests and grades, rows and tables are ours.

lm-eval is imported when such a task is made, and not before.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.core.cell import Cell, digest
from kvbench.core.errors import KvbenchError, unknown_name
from kvbench.core.intervals import score_interval
from kvbench.core.result import GradeRecord, Result
from kvbench.core.task import Grade, Problem, Split, Task
from kvbench.harness.measured import counted, fields
from kvbench.harness.options import LM_EVAL, Requested
from kvbench.harness.store import CompletionRecord

if TYPE_CHECKING:
    from kvbench.harness.choices import Choice
    from kvbench.harness.lm_eval_model import Call
    from kvbench.models.source import LoadedModel


class LmEvalTask(Task):
    """One task of lm-eval; its generation length is its own.

    Args:
        name: as it is written, `lm_eval:NAME`.
        include: folder of task files to look in instead of lm-eval's own ones.

    Raises:
        KvbenchError: lm-eval is not installed, or has no such task.
    """

    name: ClassVar[str] = "lm_eval"

    def __init__(self, name: str, include: str | None) -> None:
        if find_spec("lm_eval") is None:
            raise KvbenchError(f"Task '{name}' needs lm-eval; run: pip install 'kvbench[lm-eval]'")
        from lm_eval.tasks import TaskManager

        self._inner = name.removeprefix(LM_EVAL)
        with _quietly():
            self._manager = TaskManager(include_path=include, include_defaults=include is None)
            self._task = self._loaded(include)
        self.output_type = str(self._task.OUTPUT_TYPE)
        self.revision = f"sha256:{digest(self._described())}"
        self._cap = 0

    def problems(self, gen_len: int, n: int, seed: int, split: Split = "eval") -> list[Problem]:
        """Return one problem a document: its id, and the longest text that the model is told of it."""
        from kvbench.harness.lm_eval_model import generation_cap

        with _quietly():
            self._task.build_all_requests(limit=n, rank=0, world_size=1)
        texts: dict[int, str] = {}
        for request in self._task.instances:
            generates = request.request_type == "generate_until"
            if generates:
                self._cap = max(self._cap, generation_cap(request.args[1], 256))
            text = request.args[0] if generates else "".join(request.args)
            texts[request.doc_id] = max(texts.get(request.doc_id, ""), text, key=len)
        return [Problem(self._problem(doc), text, "") for doc, text in sorted(texts.items())]

    def new_tokens(self, gen_len: int) -> int:
        return self._cap

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Refuse: lm-eval grades."""
        raise KvbenchError(f"Task 'lm_eval:{self._inner}' is graded by lm-eval when it runs.")

    def measure(
        self, blank: Result, cell: Cell, loaded: LoadedModel, choice: Choice
    ) -> tuple[Result, tuple[CompletionRecord, ...]]:
        """Run the task: a row, and what was answered.

        Raises:
            KvbenchError: several samples were asked for.
        """
        from lm_eval import simple_evaluate

        from kvbench.harness.lm_eval_model import Arrangement, KvbenchLM

        if cell.samples > 1:
            raise KvbenchError(f"Task '{cell.task}' has its own number of answers to a problem; --samples has to be 1.")
        budget = None if cell.slots is None else Requested(slots=cell.slots)
        lm = KvbenchLM(Arrangement(loaded, choice, budget, cell.reference_length, cell.rows, cell.seed))
        with _quietly():
            told = simple_evaluate(
                model=lm,
                tasks=[self._inner],
                task_manager=self._manager,
                limit=cell.problems,
                bootstrap_iters=0,
                # These would reset the random state of the whole process; few-shot examples have a seed of their own.
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
            )
        (call,) = lm.calls
        metrics = {name: value for name, value in told["results"][self._inner].items() if _is_metric(name, value)}
        name, _, chosen = next(iter(metrics)).partition(",")
        samples = sorted(
            (sample for sample in told["samples"][self._inner] if sample["filter"] == chosen), key=lambda s: s["doc_id"]
        )
        result = replace(
            blank,
            n=len(samples),
            metrics=json.dumps(metrics),
            without_eviction=call.without_eviction,
            **counted(call.audit, call.timing),
            feeding=call.feeding,
            prefill="chunked" if call.feeding.startswith("chunk") else "exact",
            path="plain",
            peak_memory=call.peak_memory,
        )
        values = [sample.get(name) for sample in samples]
        if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in values):
            return result, ()  # perplexities and the like are no scores
        records = tuple(
            self._record(cell, sample, float(value), call, index)
            for index, (sample, value) in enumerate(zip(samples, values, strict=True))
        )
        if call.ended:
            result = replace(
                result,
                truncated=1 - sum(call.ended) / len(call.ended),
                output_length=sum(call.lengths) / len(call.lengths),
            )
        return replace(result, **fields("score", score_interval([float(value) for value in values]))), records

    def _record(self, cell: Cell, sample: dict[str, Any], value: float, call: Call, index: int) -> CompletionRecord:
        text = json.dumps(
            {"told": _rounded(sample["resps"]), "answer": _rounded(sample["filtered_resps"])}, default=str
        )
        single = len(call.lengths) == cell.problems
        grade = GradeRecord(
            key=cell.key,
            problem=self._problem(sample["doc_id"]),
            sample=0,
            correct=value,
            steps_correct=None,
            tokens=call.lengths[index] if single else 0,
            finished=call.ended[index] if single else True,
            near_ties=0,
            digest=digest(text),
        )
        return CompletionRecord.of(cell, grade, text)

    def _problem(self, document: int) -> str:
        return f"{LM_EVAL}{self._inner}/{document}"

    def _loaded(self, include: str | None) -> Any:
        known = self._manager.all_tasks
        if self._inner not in known:
            where = f"task in {include}" if include is not None else "task of lm-eval"
            raise unknown_name(where, self._inner, known if include is not None else ())
        tasks = self._manager.load([self._inner])["tasks"]
        if list(tasks) != [self._inner]:
            raise KvbenchError(f"'{self._inner}' is a group of lm-eval's; name one of its tasks: {', '.join(tasks)}.")
        return tasks[self._inner]

    def _described(self) -> str:
        """The task's settings and documents as text."""
        documents = [dict(document) for document in self._task.eval_docs]
        return json.dumps([self._task.dump_config(), documents], sort_keys=True, default=_named)


def _is_metric(name: str, value: object) -> bool:
    return "," in name and "_stderr" not in name and isinstance(value, int | float)


def _rounded(answers: Any) -> Any:
    """Answers with log-likelihoods as exact as rounding lets them be."""
    if isinstance(answers, list | tuple):
        return [_rounded(answer) for answer in answers]
    return round(answers, 4) if isinstance(answers, float) else answers


def _named(thing: object) -> str:
    """Functions by their names: their addresses change."""
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """lm-eval draws bars; only a terminal wants them."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield
