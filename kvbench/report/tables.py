"""Stored rows to a data frame with the names that scripts rely on, and to text, Markdown, CSV and JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.core.intervals import Estimate
from kvbench.core.result import Environment, Result
from kvbench.report.load import Grades, Stored
from kvbench.report.paired import paired
from kvbench.report.summary import Conditions, Line, summarise

Format = Literal["text", "md", "csv", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)

_INTEGERS = frozenset(
    {
        "task_version",
        "gen_length",
        "budget",
        "reference_length",
        "n",
        "samples",
        "seed",
        "slots",
        "evictions",
        "violations",
        "kv_bytes",
        "scorer_bytes",
        "metadata_bytes",
        "peak_memory",
        "near_ties",
        "top_k",
        "rows",
        "threads",
        "schema_version",
    }
)
_WIDTH_WITHOUT_TERMINAL = 140


def frame(stored: Stored) -> pd.DataFrame:
    """One row a cell, with relative scores and alarms; columns in the order of `Result`, the environment's behind."""
    return pd.DataFrame(
        {name: _column(name, values) for name, values in _columns(paired(stored)).items()},
        columns=list(_columns([])),
    )


def render(stored: Stored, form: Format = "text") -> str:
    """The table: a summary for people as text or Markdown, every cell as CSV or JSON."""
    match form:
        case "csv":
            return frame(stored).to_csv(index=False)
        case "json":
            return _json(stored)
        case "md":
            return "\n\n".join(_markdown(grid) for grid in _grids(paired(stored), stored.grades)) + "\n"
        case "text":
            # Whatever reads this, it is not the terminal: no colours, and room for every column.
            console = Console(file=io.StringIO(), width=_WIDTH_WITHOUT_TERMINAL, color_system=None)
            with console.capture() as captured:
                show(stored, console)
            return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def only(stored: Stored, keys: Set[str]) -> Stored:
    """The rows with these keys, and the dense rows on the same problems: what a run shows of a larger folder."""
    wanted = {(row.twin_key, lm) for row in stored.rows if row.key in keys for lm in (None, row.adapted_lm)}
    rows = (r for r in stored.rows if r.key in keys or (r.role != "policy" and (r.twin_key, r.adapted_lm) in wanted))
    return Stored(tuple(rows), stored.grades)


def show(stored: Stored, console: Console) -> None:
    """Print the summary."""
    for grid in _grids(paired(stored), stored.grades):
        console.print(grid.title, style="bold", markup=False, highlight=False, soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 0))
        for index, heading in enumerate(grid.heading):
            table.add_column(heading, justify="left" if index == 0 else "right")
        for row in grid.rows:
            table.add_row(*map(escape, row))
        console.print(table)
        for note in grid.notes:
            console.print(f"  ! {note}", markup=False, highlight=False, soft_wrap=True)
        console.print()


@dataclass(frozen=True)
class _Grid:
    """A table of text."""

    title: str
    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def _columns(rows: Sequence[Result]) -> dict[str, list[object]]:
    columns: dict[str, list[object]] = {
        field.name: [getattr(row, field.name) for row in rows]
        for field in dataclasses.fields(Result)
        if field.name not in {"environment", "alarms"}
    }
    columns["alarms"] = ["; ".join(row.alarms) or None for row in rows]
    for field in dataclasses.fields(Environment):
        columns[field.name] = [
            None if row.environment is None else getattr(row.environment, field.name) for row in rows
        ]
    return columns


def _column(name: str, values: list[object]) -> pd.Series:
    """A nullable column: a missing integer must not turn the others into floats."""
    if name in _INTEGERS:
        return pd.Series(values, dtype="Int64")
    return pd.Series(values, dtype=object) if not _numeric(values) else pd.Series(values, dtype="Float64")


def _numeric(values: list[object]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, float) for value in known)


def _json(stored: Stored) -> str:
    columns = _columns(paired(stored))
    records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return json.dumps(records, indent=1, allow_nan=False) + "\n"


def _grids(rows: Sequence[Result], grades: Grades) -> list[_Grid]:
    grids = []
    for shared, lines in summarise(rows, grades):
        grids.append(_overview(shared, lines, rows))
        if any(len(line.tasks) > 1 for line in lines):
            grids.append(_by_task(lines))
    return grids


def _overview(shared: Conditions, lines: Sequence[Line], rows: Sequence[Result]) -> _Grid:
    sampling = "greedy" if shared.temperature == 0 else f"temperature {shared.temperature:g}"
    seeds = ", ".join(map(str, sorted({row.seed for row in rows})))
    completions = "" if shared.samples == 1 else f", {shared.samples} samples each"
    title = (
        f"{shared.model}, {shared.dtype} on {shared.device}, {sampling}, "
        f"{shared.n} problems a task{completions}, seed {seeds}"
    )
    with_lm = any(line.of_lm is not None for line in lines)
    with_held_out = any(line.held_out is not None for line in lines)
    heading = [
        "policy", "removed", "length", "relative score (95 %)", *(["held-out family"] if with_held_out else []),
        *(["of its LM"] if with_lm else []), "score", "achieved", "KV", "state", "tokens/s",
    ]  # fmt: skip
    body = [
        (
            line.label,
            line.requested,
            str(line.gen_length),
            _estimate(line.trained),
            *([_estimate(line.held_out)] if with_held_out else []),
            *([_number(line.of_lm)] if with_lm else []),
            _number(line.score),
            _decimals(line.cr_mean),
            _bytes(line.kv_bytes),
            _bytes(line.scorer_bytes),
            "-" if line.tokens_per_s is None else f"{line.tokens_per_s:.0f}",
        )
        for line in lines
    ]
    return _Grid(title, tuple(heading), tuple(body), tuple(_notes(lines)))


def _notes(lines: Sequence[Line]) -> list[str]:
    """Each sentence once, with the lines and the tasks that it is about."""
    places: dict[str, list[str]] = {}
    for line in lines:
        for note, tasks in line.notes.items():
            which = "all tasks" if len(tasks) == len(line.tasks) > 1 else ", ".join(dict.fromkeys(tasks))
            places.setdefault(note, []).append(f"{line.label} {line.requested} {line.gen_length} ({which})")
    return [f"{note.rstrip('.')}: {'; '.join(where)}" for note, where in places.items()]


def _by_task(lines: Sequence[Line]) -> _Grid:
    tasks = sorted({task for line in lines for task in line.tasks})
    body = [
        (line.label, line.requested, str(line.gen_length), *(_number(line.tasks.get(task)) for task in tasks))
        for line in lines
    ]
    title = "by task: relative score; on the line of the base model its score"
    return _Grid(title, ("policy", "removed", "length", *tasks), tuple(body))


def _markdown(grid: _Grid) -> str:
    lines = [
        f"**{grid.title}**",
        "",
        _markdown_row(grid.heading),
        _markdown_row([":--", *["--:"] * (len(grid.heading) - 1)]),
        *map(_markdown_row, grid.rows),
    ]
    if grid.notes:
        lines += ["", *(f"- {note}" for note in grid.notes)]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.lo == estimate.hi == estimate.value:
        return _decimals(estimate.value)
    return f"{_decimals(estimate.value)} [{_decimals(estimate.lo, '0')}, {_decimals(estimate.hi, 'inf')}]"


def _number(estimate: Estimate | None) -> str:
    return "-" if estimate is None else _decimals(estimate.value)


def _decimals(value: float | None, missing: str = "-") -> str:
    return missing if value is None else f"{value:.3f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
