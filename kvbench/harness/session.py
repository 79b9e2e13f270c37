"""A whole run: options to a plan, a plan to stored rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers.utils.logging import disable_progress_bar

from kvbench.core.cell import MEASUREMENT_VERSION
from kvbench.core.errors import KvbenchError, canonical
from kvbench.core.result import SCHEMA_VERSION, Result
from kvbench.data.lock import Lock
from kvbench.engine.path import require
from kvbench.engine.run import contact
from kvbench.harness.choices import choose
from kvbench.harness.execute import Executor, LocalExecutor, Outcome
from kvbench.harness.options import Checked
from kvbench.harness.plan import Plan, Planned, automatic_rows, make_plan
from kvbench.harness.problems import ProblemSource, load_tasks
from kvbench.harness.store import Settings, Store
from kvbench.harness.ungraded import Ungraded
from kvbench.harness.workers import outcomes_of, processes_for
from kvbench.models.open import open_model
from kvbench.models.source import LoadedModel
from kvbench.plugins import Registry

# The embedded model's arithmetic is small and its answers have to agree between devices.
_ALWAYS_FLOAT32 = frozenset({"ref"})


class Watcher(Protocol):
    """Who is told how a run goes on; the defaults of `Silent` tell nobody."""

    def started(self, todo: int, done: int) -> None:
        """Before the first cell: how many are to do, how many were done before."""

    def cell(self, planned: Planned) -> Callable[[int], None] | None:
        """Before each cell; returns what is called with the number of new tokens."""

    def grading(self, done: int, completions: int) -> None:
        """While a cell's completions are graded; not told of cells in other processes."""

    def closed(self, result: Result) -> None:
        """After each cell is durable."""


class Silent:
    """Tells nobody."""

    def started(self, todo: int, done: int) -> None:
        """Nothing."""

    def cell(self, planned: Planned) -> None:
        """Nothing."""

    def grading(self, done: int, completions: int) -> None:
        """Nothing."""

    def closed(self, result: Result) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Session:
    """A loaded model with a plan for it; `lock` holds the data sets' revisions, `parameters` is the model's size."""

    checked: Checked
    plan: Plan
    executor: Executor
    settings: Settings
    lock: Lock
    parameters: int = 0


@dataclass(frozen=True)
class Finished:
    """What a run left: the rows of its shard, in the order of the plan, and where they lie."""

    folder: Path
    rows: tuple[Result, ...]

    @property
    def failed(self) -> int:
        """Cells that failed."""
        return sum(row.status == "failed" for row in self.rows)


def open_session(checked: Checked, registry: Registry, processes: int = 1) -> Session:
    """Load the model, choose policies and plan the grid.

    Args:
        checked: what was asked for.
        registry: where names are looked up.
        processes: how many sessions like this one share the machine; noted in the rows.

    Raises:
        KvbenchError: something that was asked for cannot be had.
    """
    loaded = load_model(checked, registry)
    device = loaded.device.type
    require(checked.decode_path, loaded)
    lock = Lock(checked.out)
    problems = ProblemSource(loaded, load_tasks(checked.tasks, registry, lock, dict(checked.data)))
    plan = make_plan(checked, choose(checked, loaded, registry), loaded, problems)
    settings = Settings(
        model=loaded.name,
        weights_hash=loaded.weights_hash,
        problems=checked.limit,
        samples=checked.samples,
        seeds=checked.seeds,
        temperature=checked.temperature,
        top_p=checked.top_p,
        top_k=checked.top_k,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=device,
        rows=checked.rows or automatic_rows(device, checked.limit * checked.samples),
        attention=checked.decode_path,
        measurement=MEASUREMENT_VERSION,
        schema=SCHEMA_VERSION,
    )
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    return Session(
        checked, plan, LocalExecutor(loaded, problems, Ungraded(checked.out), processes), settings, lock, parameters
    )


def load_model(checked: Checked, registry: Registry) -> LoadedModel:
    """The model that was asked for, on its device and in its number type.

    Raises:
        KvbenchError: it cannot be loaded, or the engine cannot run it.
    """
    if checked.threads is not None:
        torch.set_num_threads(checked.threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers draws its own bars, terminal or not
    device = device_of(checked.device)
    loaded = open_model(checked.model, registry, torch.device(device), dtype_of(checked.dtype, checked.model, device))
    with contact(loaded):
        pass  # a model that the engine cannot run is refused now, not once a cell
    return loaded


def run_session(session: Session, watcher: Watcher | None = None) -> Finished:
    """Measure every cell of the shard that the folder does not hold yet; failed ones are tried again.

    Raises:
        KvbenchError: the folder cannot be written or holds another configuration.
    """
    watcher = watcher or Silent()
    ungraded = Ungraded(session.checked.out)
    with Store(session.checked.out, session.settings) as store:
        session.lock.write()
        todo = [planned for planned in session.plan.mine if not _done(store, planned)]
        watcher.started(len(todo), len(session.plan.mine) - len(todo))
        for planned in todo:
            if planned.skip is not None:
                store.add(planned.row())
        for _, outcome in _outcomes(session, [planned for planned in todo if planned.skip is None], watcher):
            store.add(outcome.result, outcome.completions)
            if outcome.result.status == "ok":
                ungraded.drop(outcome.result.key)
            watcher.closed(outcome.result)
        rows = [store.result(planned.cell.key) for planned in session.plan.mine]
    return Finished(session.checked.out, tuple(row for row in rows if row is not None))


def _outcomes(session: Session, todo: list[Planned], watcher: Watcher) -> Iterator[tuple[Planned, Outcome]]:
    processes = processes_for(session.checked, session.settings.device, session.parameters, len(todo))
    if processes > 1:
        yield from outcomes_of(session, todo, processes, watcher)
        return
    for planned in todo:
        yield planned, session.executor.execute(planned, watcher.cell(planned), watcher.grading)


def _done(store: Store, planned: Planned) -> bool:
    row = store.result(planned.cell.key)
    return row is not None and row.status == "ok"


def device_of(wanted: str) -> str:
    """`cpu` or `cuda`.

    Raises:
        KvbenchError: CUDA is asked for and not there.
    """
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise KvbenchError("--device is cuda, but torch finds no CUDA device here; use --device cpu.")
    return wanted


def dtype_of(wanted: str, model: str, device: str) -> torch.dtype:
    """The number type of a model on a device."""
    if wanted != "auto":
        return torch.float32 if wanted == "float32" else torch.bfloat16
    always = canonical(model) in _ALWAYS_FLOAT32
    return torch.bfloat16 if device == "cuda" and not always else torch.float32
