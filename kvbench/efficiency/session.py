"""A whole run of `kvbench efficiency`: cells one after another, each a row, whatever happens to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import LearnedPolicy, Policy
from kvbench.efficiency.clock import bandwidth
from kvbench.efficiency.heads import measured_heads
from kvbench.efficiency.largest import largest_batch, room
from kvbench.efficiency.measure import Subject, measure
from kvbench.efficiency.memory import clear, one_error
from kvbench.efficiency.options import CheckedEfficiency
from kvbench.efficiency.plan import BASELINE, Choice, Planned, make_plan
from kvbench.efficiency.record import EfficiencyCell, EfficiencyResult, Figures
from kvbench.efficiency.stock import measure_stock
from kvbench.efficiency.store import EfficiencyStore
from kvbench.efficiency.traffic import held
from kvbench.efficiency.whole import generate_whole
from kvbench.engine.run import contact
from kvbench.harness.choices import make_policy
from kvbench.harness.environment import commit, environment
from kvbench.harness.session import device_of, dtype_of
from kvbench.models.checkpoint import make_scorers
from kvbench.models.open import open_model
from kvbench.models.random_weights import find_shape, random_model, shape_names
from kvbench.models.source import LoadedModel
from kvbench.plugins import Registry

Told = Callable[[EfficiencyResult, int, int], None]
"""Called after each cell with its row, how many are done and how many there are."""

_Baseline = tuple[int, int, int]
"""Slots, length and batch of a measurement of `BASELINE`."""


@dataclass
class EfficiencySession:
    """A loaded model with a plan for it; `bandwidth` in bytes a second."""

    checked: CheckedEfficiency
    loaded: LoadedModel
    plan: list[Planned]
    baseline: Policy
    bandwidth: float
    head_shape: tuple[float, ...] | None = None
    baselines: dict[_Baseline, float] = field(default_factory=dict)


def open_session(checked: CheckedEfficiency, registry: Registry) -> EfficiencySession:
    """Measure the bandwidth, make or load the model and plan the grid.

    Raises:
        KvbenchError: something that was asked for cannot be had.
    """
    head_shape = None if checked.options.heads is None else measured_heads(checked.options.heads)
    loaded, speed = _open_model(checked, registry)
    with contact(loaded):
        pass  # a model that the engine cannot run is refused now, not once a cell
    baseline, _ = make_policy(registry.policy(BASELINE), ())
    return EfficiencySession(checked, loaded, make_plan(checked, loaded, registry), baseline, speed, head_shape)


def run_session(session: EfficiencySession, told: Told | None = None) -> list[EfficiencyResult]:
    """Measure every cell that the folder does not hold yet; failed ones are tried again.

    Raises:
        KvbenchError: the folder cannot be written.
    """
    rows = []
    with EfficiencyStore(session.checked.run.out) as store:
        for number, planned in enumerate(session.plan, start=1):
            row = store.result(planned.cell.key)
            if row is None or row.status not in ("ok", "out_of_memory"):
                row = _run_cell(session, planned)
                store.add(row)
            rows.append(row)
            if told is not None:
                told(row, number, len(session.plan))
    return rows


def _open_model(checked: CheckedEfficiency, registry: Registry) -> tuple[LoadedModel, float]:
    """The model, and the bandwidth of its device, measured before the model takes its memory."""
    run = checked.run
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers draws its own bars, terminal or not
    device = torch.device(device_of(run.device))
    dtype = dtype_of(run.dtype, run.model, device.type)
    path = find_shape(run.model)
    if path is None and run.model not in registry.models and "/" not in run.model and not Path(run.model).is_dir():
        known = ", ".join([*shape_names(), *sorted(registry.models)])
        raise KvbenchError(
            f"There is no shape or model named '{run.model}'; known: {known}, or a config.json, or a model's folder."
        )
    speed = bandwidth(device)
    clear(device)
    if path is not None:
        return random_model(path, device, dtype, max(run.gen_lens)), speed
    return open_model(run.model, registry, device, dtype), speed


def _run_cell(session: EfficiencySession, planned: Planned) -> EfficiencyResult:
    blank = EfficiencyResult(
        cell=planned.cell,
        status="skipped",
        reason=planned.skip,
        command=session.checked.options.command,
        commit=commit().sha,
        environment=environment(session.loaded.device.type),
    )
    if planned.skip is not None:
        return blank
    try:
        figures = _measured(session, planned)
    except torch.OutOfMemoryError as error:
        row = replace(blank, status="out_of_memory", reason=_one_line(error))
    except KvbenchError as error:
        row = replace(blank, status="failed", reason=str(error))
    except Exception as error:  # noqa: BLE001 - the cells after it are measured, whatever this one met
        row = replace(blank, status="failed", reason=f"{type(error).__name__}: {_one_line(error)}")
    else:
        return replace(blank, status="ok", figures=figures)
    # Here the error, and with it every tensor of its frames, is gone.
    clear(session.loaded.device)
    return row


def _measured(session: EfficiencySession, planned: Planned) -> Figures:
    cell, loaded = planned.cell, session.loaded
    if planned.choice is None:
        assert cell.batch_asked is not None
        return measure_stock(loaded, cell, cell.batch_asked, session.bandwidth)
    subject = _subject(session, planned.choice)
    if cell.batch_asked is not None:
        figures = measure(subject, cell, cell.batch_asked, session.bandwidth)
    else:
        figures = _largest(session, subject, cell)
    if session.checked.options.scoring and subject.policy.evicts and subject.policy.hard_budget:
        figures = _with_scoring(session, cell, figures)
    if cell.whole and figures.generation_s is not None:
        seconds, setup = generate_whole(subject, cell, figures.batch)
        ratio = seconds / figures.generation_s
        figures = replace(figures, whole_s=seconds, whole_setup_s=setup, whole_ratio=ratio)
    return figures


def _subject(session: EfficiencySession, choice: Choice) -> Subject:
    loaded, policy = session.loaded, choice.policy
    if choice.checkpoint is not None:
        scorers = choice.checkpoint.scorers(loaded.geometry)
    else:
        torch.manual_seed(0)
        scorers = make_scorers(policy, loaded.geometry) if isinstance(policy, LearnedPolicy) else None
    if scorers is not None:
        scorers.to(loaded.device).requires_grad_(False).eval()
    return Subject(loaded, policy, scorers, session.head_shape)


def _largest(session: EfficiencySession, subject: Subject, cell: EfficiencyCell) -> Figures:
    device = session.loaded.device
    clear(device)
    there = room(device, cell.memory_limit)
    with one_error(), torch.inference_mode():
        layers = subject.setting(cell).layers(1, torch.zeros(1, dtype=torch.int64, device=device))
        one = held(session.loaded.model, layers, subject.scorers)
        del layers
    fixed = one.weights + one.scorer

    def run(batch: int) -> Figures:
        figures = measure(subject, cell, batch, session.bandwidth)
        if figures.peak_memory > there:
            raise torch.OutOfMemoryError(f"a batch of {batch} takes more than {there} bytes")
        return figures

    return largest_batch(there, fixed, one.total - fixed, run)


def _with_scoring(session: EfficiencySession, cell: EfficiencyCell, figures: Figures) -> Figures:
    """The figures beside those of the baseline in as many slots."""
    place = (figures.capacity, cell.gen_length, figures.batch)
    if cell.policy == BASELINE:
        session.baselines[place] = figures.ms_per_step
        return figures
    if place not in session.baselines:
        twin = replace(cell, policy=BASELINE, slots=figures.capacity, points=1)
        try:
            found = measure(
                Subject(session.loaded, session.baseline), twin, figures.batch, session.bandwidth, reads=False
            )
        except torch.OutOfMemoryError:
            return replace(figures, notes=(*figures.notes, f"{BASELINE} in as many slots ran out of memory"))
        session.baselines[place] = found.ms_per_step
    baseline = session.baselines[place]
    more = figures.ms_per_step - baseline
    return replace(figures, baseline_ms=baseline, scoring_ms=more, scoring_share=more / figures.ms_per_step)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
