"""`kvbench plot-training`: the evaluations of several trainings, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.core.errors import KvbenchError

_PANELS = (("top1", "token accuracy"), ("recall", "recall of the teacher's top-k"), ("mass", "retained mass"))


def plot_training(
    runs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders that 'kvbench train' wrote, or their logs.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Picture to write: .png, .svg or .pdf.")],
    cr: Annotated[str | None, typer.Option("--cr", help="One ratio, as 3/4; the mean of all otherwise.")] = None,
) -> None:
    """Plot token accuracy, recall and retained mass during training, from log.jsonl files.

    Example: kvbench plot-training runs/kvpop runs/kvpop-immediate --out curves.png
    """
    curves = {run.stem if run.is_file() else run.name: _evaluations(run, cr) for run in runs}
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KvbenchError("Plots need the package 'matplotlib'; pip install 'kvbench[plot]'.") from error
    figure = Figure(figsize=(4 * len(_PANELS), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, label) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for run, records in curves.items():
            points = [(record["step"] + 1, record[name]) for record in records if record.get(name) is not None]
            axes.plot([step for step, _ in points], [value for _, value in points], marker=".", label=run)
        axes.set_xlabel("step")
        axes.set_title(label)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    try:
        # Text stays text, so that a picture can be searched and compared.
        with _plain_text():
            figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise KvbenchError(f"Cannot write the picture {out}: {error}.") from error


def _plain_text() -> Any:
    from matplotlib import rc_context

    return rc_context({"svg.fonttype": "none"})


def _evaluations(run: Path, cr: str | None) -> list[dict[str, Any]]:
    """The evaluations of a training: step and values, of one ratio or of all."""
    path = run if run.is_file() else run / "log.jsonl"
    if not path.is_file():
        raise KvbenchError(f"{run} holds no training: it has no log.jsonl.")
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError as error:
            raise KvbenchError(f"{path} is damaged: a line is not JSON.") from error
        if "evaluation" not in record:
            continue
        values = record["evaluation"]
        if cr is not None:
            if cr not in values["by_cr"]:
                raise KvbenchError(f"{run} was not evaluated at ratio {cr}; it has {', '.join(values['by_cr'])}.")
            values = values["by_cr"][cr]
        found.append({"step": record["step"], **values})
    if not found:
        raise KvbenchError(f"{run} has no evaluation in its log yet.")
    return found
