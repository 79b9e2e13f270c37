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

from kvbench.core.intervals import Estimate
from kvbench.core.result import Environment, Result
from kvbench.core.samples import groups, pass_at
from kvbench.report.grid import print_grid
from kvbench.report.load import Stored
from kvbench.report.paired import paired
from kvbench.report.summary import Conditions, Line, summarise

Format = Literal["text", "md", "csv", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)

# Annotations are text, since both modules postpone their evaluation.
_INTEGERS = frozenset(
    field.name
    for record in (Result, Environment)
    for field in dataclasses.fields(record)
    if field.type in ("int", "int | None")
)
_WIDTH_WITHOUT_TERMINAL = 100

_FEW = 3
"""Tasks that a note still names."""


def frame(stored: Stored, ks: Sequence[int] = ()) -> pd.DataFrame:
    """One row a cell, with relative scores and alarms; columns in the order of `Result`, the environment's behind.

    Args:
        stored: rows and grades.
        ks: for each k, columns `pass_at_K`, `pass_at_K_lo` and `pass_at_K_hi` at the end.
    """
    columns = _columns(stored, ks)
    return pd.DataFrame({name: _column(name, values) for name, values in columns.items()}, columns=list(columns))


def render(stored: Stored, form: Format = "text", ks: Sequence[int] = ()) -> str:
    """The table: a summary for people as text or Markdown, every cell as CSV or JSON; with pass@k for these k."""
    match form:
        case "csv":
            return frame(stored, ks).to_csv(index=False)
        case "json":
            return _json(stored, ks)
        case "md":
            return _markdown(_report(stored, ks))
        case "text":
            # Whatever reads this, it is not the terminal: no colours, and the same width everywhere.
            console = Console(file=io.StringIO(), width=_WIDTH_WITHOUT_TERMINAL, color_system=None)
            with console.capture() as captured:
                show(stored, console, ks)
            return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def only(stored: Stored, keys: Set[str]) -> Stored:
    """The rows with these keys, and the dense rows on the same problems: what a run shows of a larger folder."""
    wanted = {(row.twin_key, lm) for row in stored.rows if row.key in keys for lm in (None, row.adapted_lm)}
    rows = (r for r in stored.rows if r.key in keys or (r.role != "policy" and (r.twin_key, r.adapted_lm) in wanted))
    return Stored(tuple(rows), stored.grades)


def show(stored: Stored, console: Console, ks: Sequence[int] = ()) -> None:
    """Print the summary."""
    report = _report(stored, ks)
    for section in report.sections:
        console.print(section.title, style="bold", markup=False, highlight=False, soft_wrap=True)
        for grid in section.grids:
            print_grid(console, grid.title, grid.heading, grid.rows)
        if section.notes:
            console.print()
        for note in section.notes:
            console.print(f"! {note}", markup=False, highlight=False, soft_wrap=True)
        console.print()
    for line in report.legend:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Grid:
    """A table of text."""

    title: str
    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Section:
    """The tables of rows that may be compared, and what is wrong with them."""

    title: str
    grids: tuple[_Grid, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Report:
    """All that is shown; the legend explains the columns once."""

    sections: tuple[_Section, ...]
    legend: tuple[str, ...]


def _columns(stored: Stored, ks: Sequence[int]) -> dict[str, list[object]]:
    rows = paired(stored)
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
    for k in ks:
        passes = [pass_at(groups(stored.grades.get(row.key, ())), k) or (None, None, None) for row in rows]
        for place, limit in enumerate(("", "_lo", "_hi")):
            columns[f"pass_at_{k}{limit}"] = [estimate[place] for estimate in passes]
    return columns


def _column(name: str, values: list[object]) -> pd.Series:
    """A nullable column: a missing integer must not turn the others into floats."""
    if name in _INTEGERS:
        return pd.Series(values, dtype="Int64")
    return pd.Series(values, dtype=object) if not _numeric(values) else pd.Series(values, dtype="Float64")


def _numeric(values: list[object]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, float) for value in known)


def _json(stored: Stored, ks: Sequence[int]) -> str:
    columns = _columns(stored, ks)
    records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return json.dumps(records, indent=1, allow_nan=False) + "\n"


def _report(stored: Stored, ks: Sequence[int]) -> _Report:
    rows = paired(stored)
    # pass@1 is the score; without a wish, the other end.
    wanted = tuple(ks) or tuple(sorted({row.samples for row in rows} - {1}))
    summary = summarise(rows, stored.grades, wanted)
    of_data = {row.task for row in rows if row.data_revision is not None}
    held_out = {row.task for row in rows if row.held_out}
    sections = tuple(
        _Section(_title(shared, rows), tuple(_grids(lines, held_out, shared.samples, of_data)), tuple(_notes(lines)))
        for shared, lines in summary
    )
    return _Report(sections, tuple(_legend([line for _, lines in summary for line in lines], held_out)))


def _title(shared: Conditions, rows: Sequence[Result]) -> str:
    sampling = "greedy" if shared.temperature == 0 else f"temperature {shared.temperature:g}"
    seeds = ", ".join(map(str, sorted({row.seed for row in rows})))
    completions = "" if shared.samples == 1 else f", {shared.samples} samples each"
    return (
        f"{shared.model}, {shared.dtype} on {shared.device}, {sampling}, length {shared.gen_length}, "
        f"{shared.n} problems a task{completions}, seed {seeds}"
    )


def _grids(lines: Sequence[Line], held_out: Set[str], samples: int, of_data: Set[str]) -> list[_Grid]:
    # Documents have no answers: a table of nothing but documents has no use for the first grid.
    grids = [_quality(lines)] if any(line.n or line.documents is None for line in lines) else []
    if any(line.documents is not None for line in lines):
        grids.append(_documents(lines))
    if samples > 1 or any(task in of_data for line in lines for task in line.tasks):
        grids.append(_completions(lines, samples))
    grids.append(_cost(lines))
    if any(len(line.tasks) > 1 for line in lines):
        grids.append(_by_task(lines, held_out))
    return grids


def _quality(lines: Sequence[Line]) -> _Grid:
    with_lm = any(line.of_lm is not None for line in lines)
    with_held_out = any(line.held_out is not None for line in lines)
    heading = [
        "policy", "removed", "n", "relative [95 %]", *(["held-out [95 %]"] if with_held_out else []),
        *(["of LM"] if with_lm else []), "score", "steps",
    ]  # fmt: skip
    body = [
        (
            line.label,
            line.requested,
            str(line.n),
            _estimate(line.trained),
            *([_estimate(line.held_out)] if with_held_out else []),
            *([_number(line.of_lm)] if with_lm else []),
            _number(line.score),
            _decimals(line.steps),
        )
        for line in lines
    ]
    return _Grid("What is left of the dense model", tuple(heading), tuple(body))


def _documents(lines: Sequence[Line]) -> _Grid:
    heading = ("policy", "removed", "NLL", "over dense [95 %]", "KL [95 %]", "top-1", "fed")
    body = [
        (
            line.label,
            line.requested,
            _decimals(line.documents.nll),
            _nats(line.documents.excess),
            _nats(line.documents.kl),
            _decimals(line.documents.top1),
            line.documents.feeding,
        )
        for line in lines
        if line.documents is not None
    ]
    return _Grid("Documents, told token by token", heading, tuple(body))


def _completions(lines: Sequence[Line], samples: int) -> _Grid:
    ks = [k for k in dict.fromkeys(k for line in lines for k in line.passes) if k <= samples]
    votes = [f"maj@{samples} [95 %]"] if samples > 1 else []
    heading = ["policy", "removed", *(f"pass@{k} [95 %]" for k in ks), *votes, "finished [95 %]", "truncated", "tokens"]
    body = [
        (
            line.label,
            line.requested,
            *(_estimate(line.passes[k]) for k in ks),
            *([_estimate(line.majority)] if votes else []),
            _estimate(line.ends.finished) if line.ends is not None else "-",
            _decimals(line.ends.truncated.value) if line.ends is not None else "-",
            f"{line.ends.length.value:.0f}" if line.ends is not None else "-",
        )
        for line in lines
    ]
    return _Grid("How answers ended, and what several of them say", tuple(heading), tuple(body))


def _cost(lines: Sequence[Line]) -> _Grid:
    heading = ("policy", "removed", "achieved", "fullest", "KV", "state", "ms/step", "tokens/s")
    body = [
        (
            line.label,
            line.requested,
            _decimals(line.cr_mean),
            "-" if line.role != "policy" else _decimals(line.cr_peak),
            _bytes(line.kv_bytes),
            _bytes(line.scorer_bytes),
            "-" if line.ms_per_step is None else f"{line.ms_per_step:.1f}",
            "-" if line.tokens_per_s is None else f"{line.tokens_per_s:.0f}",
        )
        for line in lines
    ]
    return _Grid("What it costs", heading, tuple(body))


def _by_task(lines: Sequence[Line], held_out: Set[str]) -> _Grid:
    tasks = sorted({task for line in lines for task in line.tasks})
    body = [(line.label, line.requested, *(_number(line.tasks.get(task)) for task in tasks)) for line in lines]
    heading = ("policy", "removed", *(f"{task}*" if task in held_out else task for task in tasks))
    return _Grid("By task: relative score; on the first line the dense model's own score", heading, tuple(body))


def _notes(lines: Sequence[Line]) -> list[str]:
    """Each alarm, failure or skip as one short line: where it is, or how often when it is in many places."""
    places: dict[str, list[tuple[Line, Sequence[str]]]] = {}
    for line in lines:
        for note, tasks in line.notes.items():
            places.setdefault(note.rstrip("."), []).append((line, tasks))
    return [f"{note}: {_places(found)}" for note, found in places.items()]


def _places(found: Sequence[tuple[Line, Sequence[str]]]) -> str:
    cells = sum(len(tasks) for _, tasks in found)
    if len(found) == 1:
        line, tasks = found[0]
        which = ", ".join(dict.fromkeys(tasks)) if cells <= _FEW else f"{cells} tasks"
        return f"{line.label} {line.requested} ({which})"
    counts: dict[str, int] = {}
    for line, tasks in found:
        counts[line.label] = counts.get(line.label, 0) + len(tasks)
    return f"{cells} cells ({', '.join(f'{label} {count}' for label, count in counts.items())})"


def _legend(lines: Sequence[Line], held_out: Set[str]) -> list[str]:
    if not lines:
        return []
    told = []
    # Documents are in no score: a table of nothing else needs no word about answers.
    answers = any(line.documents is None or line.score is not None or line.held_out is not None for line in lines)
    if answers:
        told.append("relative: exact answers as a share of the dense model's (full), paired by problem, 95 % interval")
    if any(line.documents is not None for line in lines):
        told.append(
            "NLL: nats a token; over dense: the same less the dense base model's; KL: from the dense base model; "
            "top-1: share of tokens with the same favourite; fed: rows fed in different ways do not compare"
        )
    if held_out:
        names = ", ".join(f"{name}*" for name in sorted(held_out))
        told.append(f"held-out: the same on {names}, a family that no policy was trained on")
    if any("@" in line.label for line in lines):
        told.append("full @P: the dense model on the LM that was trained with policy P; of LM: relative to that")
    if any(k > 1 for line in lines for k in line.passes):
        told.append(
            "pass@k: a problem is solved by one of k answers; maj@n: by the most frequent of all; score is pass@1"
        )
    if answers:
        told.append("score, steps: share of exact answers; of steps that are right before the first error")
    told.append("removed: asked for; fullest: achieved when the cache was fullest; achieved: mean over all steps")
    told.append("KV, state: bytes of one sequence in all layers; state is what the policy itself keeps")
    return told


def _markdown(report: _Report) -> str:
    parts = []
    for section in report.sections:
        parts.append(f"**{section.title}**")
        for grid in section.grids:
            table = [_markdown_row(grid.heading), _markdown_row([":--", *["--:"] * (len(grid.heading) - 1)])]
            parts += [grid.title, "\n".join([*table, *map(_markdown_row, grid.rows)])]
        if section.notes:
            parts.append("\n".join(f"- {note}" for note in section.notes))
    if report.legend:
        parts.append("\n".join(f"- {line}" for line in report.legend))
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.lo == estimate.hi == estimate.value:
        return _decimals(estimate.value)
    lo = 0.0 if estimate.lo is None else estimate.lo
    hi = "inf" if estimate.hi is None else f"{estimate.hi:.2f}"
    return f"{_decimals(estimate.value)} [{lo:.2f}, {hi}]"


def _nats(estimate: Estimate) -> str:
    if estimate.lo is None or estimate.hi is None:
        return _decimals(estimate.value)
    return f"{estimate.value:.3f} [{estimate.lo:.3f}, {estimate.hi:.3f}]"


def _number(estimate: Estimate | None) -> str:
    return "-" if estimate is None else _decimals(estimate.value)


def _decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
