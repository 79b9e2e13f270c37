"""`kvbench plot-efficiency`: time and memory over the generation length, and where policies become cheaper than dense."""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path
from typing import Annotated

import typer

from kvbench.core.errors import KvbenchError
from kvbench.efficiency.crossing import Line, lines, told
from kvbench.efficiency.record import read_rows

_FAR = 8
"""Times that differ by more are drawn on a logarithmic axis: the fast ones would be one line at the bottom."""


def plot_efficiency(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of 'kvbench efficiency'.")],
    out: Annotated[Path, typer.Option("--out", help="Picture to write: .png, .svg or .pdf.")],
    batch: Annotated[int, typer.Option(help="Only rows of this batch size.")] = 1,
    model: Annotated[str | None, typer.Option(help="Only this shape or model; needed if there are several.")] = None,
) -> None:
    """Plot milliseconds a step and peak memory against the generation length, a line a policy.

    Example: kvbench plot-efficiency kvbench-efficiency --out lengths.png
    """
    found = {row.key: row for folder in folders for row in read_rows(folder)}
    models = sorted({row.cell.model for row in found.values() if model in (None, row.cell.model)})
    if len(models) != 1:
        known = ", ".join(sorted({row.cell.model for row in found.values()}))
        raise KvbenchError(f"A plot shows one model; choose it with --model out of: {known}.")
    chosen = [row for row in found.values() if row.cell.model == models[0] and row.cell.batch_asked == batch]
    known_lines = lines(chosen)
    if not known_lines:
        raise KvbenchError(f"None of the rows was measured at batch {batch}; choose another with --batch.")
    _draw(known_lines, f"{models[0]}, batch {batch}", out)
    dense = next((line for line in known_lines if line.dense), None)
    for line in known_lines if dense is not None else ():
        if not line.dense and dense is not None:
            times, memories = told(dense.ms, line.ms), told(dense.memory, line.memory)
            sys.stdout.write(f"{_name(line)}: full is slower from length {times}, larger from {memories}\n")


def _draw(known: list[Line], title: str, out: Path) -> None:
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError as error:
        raise KvbenchError("Plots need the package 'matplotlib'; pip install 'kvbench[plot]'.") from error
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    times, memories = figure.subplots(1, 2)
    for line, style in zip(known, cycle(("-", "--", ":", "-.")), strict=False):
        # Lines that lie on one another show through.
        look = {"marker": ".", "linestyle": style, "label": _name(line)}
        times.plot(*zip(*line.ms, strict=True), **look)
        lengths, peaks = zip(*line.memory, strict=True)
        memories.plot(lengths, [peak / 2**30 for peak in peaks], **look)
    for axes, label in ((times, "ms a step"), (memories, "peak memory, GiB")):
        axes.set_xlabel("generated tokens")
        axes.set_title(label)
        axes.grid(alpha=0.3, which="both")
    memories.set_ylim(bottom=0)
    steps = [ms for line in known for _, ms in line.ms]
    if max(steps) > _FAR * min(steps):
        times.set(yscale="log", title="ms a step, logarithmic")
        times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        times.yaxis.set_major_formatter("{x:g}")
        times.yaxis.set_minor_formatter(NullFormatter())
    else:
        times.set_ylim(bottom=0)
    times.legend(fontsize="small")
    try:
        # Text stays text, so that a picture can be searched and compared.
        with rc_context({"svg.fonttype": "none"}):
            figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise KvbenchError(f"Cannot write the picture {out}: {error}.") from error


def _name(line: Line) -> str:
    return f"{line.label} {line.removed}".strip()
