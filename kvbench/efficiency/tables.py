"""Rows of cost as text, Markdown, CSV and JSON. Nothing here imports torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from kvbench.efficiency.crossing import Labels, lines, removed, told
from kvbench.efficiency.record import EfficiencyResult, Figures
from kvbench.report.grid import print_grid

Format = Literal["text", "md", "csv", "json"]

_Measured = tuple[EfficiencyResult, Figures]

_WIDTH_WITHOUT_TERMINAL = 150

_LEGEND = (
    "ms/step: median [quartiles] of a decode step of all rows; floor: bytes that it has to move over the measured bandwidth",
    "scoring: what the policy adds to streaming_llm in as many slots; vs dense: full's time over its own",
    "peak: while steps run; workspace: the peak less everything that is counted; KV, metadata, state: of all rows together",
)


@dataclass(frozen=True)
class _Grid:
    """A table of text."""

    title: str
    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def render(rows: Sequence[EfficiencyResult], form: Format = "text") -> str:
    """The tables: for people as text or Markdown, every field of every row as CSV or JSON."""
    match form:
        case "json":
            return json.dumps([_flat(row) for row in rows], indent=1, allow_nan=False) + "\n"
        case "csv":
            return _csv(rows)
        case "md":
            return _markdown(rows)
        case "text":
            # Whatever reads this, it is not the terminal: no colours, and the same width everywhere.
            console = Console(file=io.StringIO(), width=_WIDTH_WITHOUT_TERMINAL, color_system=None)
            with console.capture() as captured:
                show(rows, console)
            return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def show(rows: Sequence[EfficiencyResult], console: Console) -> None:
    """Print the tables."""
    for title, members in _sections(rows):
        console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
        for grid in _grids(members):
            print_grid(console, grid.title, grid.heading, grid.rows)
        console.print()
        for note in _notes(members):
            console.print(f"! {note}", markup=False, highlight=False, soft_wrap=True)
    for line in _LEGEND:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def _sections(rows: Sequence[EfficiencyResult]) -> list[tuple[str, list[EfficiencyResult]]]:
    """Rows of one model on one device in one number type, under a title."""
    found: dict[str, list[EfficiencyResult]] = {}
    for row in rows:
        cell = row.cell
        title = f"{cell.model}, {cell.weights} weights, {cell.dtype} on {cell.device_name}"
        found.setdefault(title, []).append(row)
    return [
        (f"{title}, medians of at least {min(row.cell.steps for row in members)} steps", members)
        for title, members in found.items()
    ]


def _grids(rows: Sequence[EfficiencyResult]) -> list[_Grid]:
    measured = [(row, row.figures) for row in rows if row.figures is not None]
    labels = Labels(rows)
    grids = [_time(measured, labels), _memory(measured, labels)] if measured else []
    if any(row.cell.points > 1 or row.cell.whole for row, _ in measured):
        grids.append(_whole(measured, labels))
    crossings = _crossings(rows)
    if crossings.rows:
        grids.append(crossings)
    return grids


def _time(measured: Sequence[_Measured], labels: Labels) -> _Grid:
    dense = {
        (row.cell.gen_length, figures.batch): figures.ms_per_step
        for row, figures in measured
        if row.cell.policy == "full" and row.cell.source == "kvbench"
    }
    heading = (
        "policy", "removed", "slots", "length", "batch", "ms/step [quartiles]", "floor", "x floor", "vs dense", "tokens/s",
        "scoring", "prefill", "path",
    )  # fmt: skip
    body = []
    for row, figures in measured:
        twin = dense.get((row.cell.gen_length, figures.batch))
        share = "-" if figures.scoring_share is None else f"{figures.scoring_ms:.3f} ({figures.scoring_share:.1%})"
        body.append(
            (
                *_place(labels(row), row, figures),
                f"{figures.ms_per_step:.3f} [{figures.ms_lo:.3f}, {figures.ms_hi:.3f}]",
                f"{figures.floor_ms:.3f}",
                f"{figures.floor_ratio:.2f}",
                "-" if twin is None else f"{twin / figures.ms_per_step:.2f}",
                f"{figures.tokens_per_s:.0f}",
                share,
                "-" if figures.prefill_ms is None else f"{figures.prefill_ms:.1f}",
                figures.path,
            )
        )
    return _Grid("Time in milliseconds", heading, tuple(body))


def _memory(measured: Sequence[_Measured], labels: Labels) -> _Grid:
    heading = (
        "policy", "removed", "slots", "length", "batch", "peak", "weights", "KV", "scorer", "metadata", "state", "workspace",
        "",
    )  # fmt: skip
    body = [
        (
            *_place(labels(row), row, figures),
            *map(
                _bytes,
                (
                    figures.peak_memory,
                    figures.weights_bytes,
                    figures.kv_bytes,
                    figures.scorer_bytes,
                    figures.metadata_bytes,
                    figures.state_bytes,
                    figures.workspace_bytes,
                ),
            ),
            "" if figures.memory == "measured" else figures.memory,
        )
        for row, figures in measured
    ]
    return _Grid("Memory", heading, tuple(body))


def _whole(measured: Sequence[_Measured], labels: Labels) -> _Grid:
    heading = (
        "policy",
        "removed",
        "slots",
        "length",
        "batch",
        "sum of steps, s",
        "tokens/s",
        "in full, s",
        "capture, s",
        "ratio",
    )
    body = [
        (
            *_place(labels(row), row, figures),
            _number(figures.generation_s),
            _number(figures.generation_tokens_per_s, 0),
            _number(figures.whole_s),
            _number(figures.whole_setup_s),
            _number(figures.whole_ratio, 3),
        )
        for row, figures in measured
        if row.cell.points > 1 or row.cell.whole
    ]
    return _Grid("Whole generations", heading, tuple(body))


def _crossings(rows: Sequence[EfficiencyResult]) -> _Grid:
    known = lines(rows)
    # Largest batches differ: their times do not compare.
    dense = {line.batch: line for line in known if line.dense and line.batch is not None}
    body = [
        (
            line.label,
            line.removed,
            str(line.batch),
            told(dense[line.batch].ms, line.ms),
            told(dense[line.batch].memory, line.memory),
        )
        for line in known
        if not line.dense and line.batch in dense and len(dense[line.batch].ms) > 1
    ]
    return _Grid("Length from which full costs more", ("policy", "removed", "batch", "time", "memory"), tuple(body))


def _place(label: str, row: EfficiencyResult, figures: Figures) -> tuple[str, str, str, str, str]:
    batch = f"{figures.batch} (largest)" if row.cell.batch_asked is None else str(figures.batch)
    return label, removed(row), str(figures.capacity), str(row.cell.gen_length), batch


def _notes(rows: Sequence[EfficiencyResult]) -> list[str]:
    notes, labels = [], Labels(rows)
    for row in rows:
        batch = "largest batch" if row.cell.batch_asked is None else f"batch {row.cell.batch_asked}"
        place = f"{labels(row)} {removed(row)} length {row.cell.gen_length} {batch}".replace("  ", " ")
        if row.status != "ok":
            notes.append(f"{place}: {row.status.replace('_', ' ')}: {row.reason}")
        elif row.figures is not None:
            notes += [f"{place}: {note}" for note in row.figures.notes]
            if row.cell.heads is not None:
                notes.append(
                    f"{place}: heads filled after {row.cell.heads}, mean {row.figures.entries:.0f} entries, "
                    f"capacity that of the longest"
                )
    arguments = dict.fromkeys((row.cell.policy, row.cell.policy_args) for row in rows if row.cell.policy_args)
    notes += [f"{policy} runs with {given}" for policy, given in arguments]
    if any(row.cell.scorer == "random" for row in rows):
        notes.append("learned policies without a checkpoint for the model have random scorers: cost only")
    return notes


def _flat(row: EfficiencyResult) -> dict[str, Any]:
    record = row.record()
    environment = record.pop("environment")
    return {**record, **environment}


def _csv(rows: Sequence[EfficiencyResult]) -> str:
    records = [_flat(row) for row in rows]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({name: json.dumps(v) if isinstance(v, list | tuple) else v for name, v in record.items()})
    return buffer.getvalue()


def _markdown(rows: Sequence[EfficiencyResult]) -> str:
    parts = []
    for title, members in _sections(rows):
        parts.append(f"**{title}**")
        for grid in _grids(members):
            table = [_markdown_row(grid.heading), _markdown_row([":--", *["--:"] * (len(grid.heading) - 1)])]
            parts += [grid.title, "\n".join([*table, *map(_markdown_row, grid.rows)])]
        if notes := _notes(members):
            parts.append("\n".join(f"- {note}" for note in notes))
    parts.append("\n".join(f"- {line}" for line in _LEGEND))
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _bytes(value: int | None) -> str:
    if value is None:
        return "-"
    size = float(value)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
