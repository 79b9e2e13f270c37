"""Rows of `results.jsonl` as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_PARTS = (
    "forward/teacher",
    "forward/scorer",
    "forward/cut-off",
    "forward/attention",
    "forward/target",
    "forward/boundary loss",
)
_STEP = (
    "step s",
    *(f"{part} s" for part in _PARTS),
    "forward s",
    "backward s",
    "clipping s",
    "optimizer s",
    "peak_gib",
)
_STEP_RATIOS = ("to dense", "to flex")
_PASS = (
    "causal SDPA forward ms", "target ms", "target / SDPA", "target with normaliser / SDPA", "what is kept / SDPA",
    "its blocks / causal", "cut-off ms", "cut-off / layer", "extra KiB a token",
)  # fmt: skip
_PREFILL = ("ms", "to dense", "extra_gib")


def render(files: Sequence[Path]) -> str:
    """Tables of the steps, passes and prefills in these files; which checks passed; what they ran on."""
    rows: list[Row] = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    by_part = {
        part: [row for row in rows if row["part"] == part] for part in ("step", "pass", "prefill", "correctness")
    }
    said = []
    if steps := by_part["step"]:
        said.append(
            _table("seconds of a step", steps, lambda row: f"{row['kind']}, {row['length']}", (*_STEP, *_STEP_RATIOS))
        )
    if passes := by_part["pass"]:
        said.append(_table("passes of one layer", passes, lambda row: str(row["length"]), _PASS))
    if prefills := by_part["prefill"]:
        said.append(
            _table("prefill", prefills, lambda row: f"{row['policy']}, {row['length']} into {row['slots']}", _PREFILL)
        )
    if checks := by_part["correctness"]:
        wrong = [row["check"] for row in checks if not row["right"]]
        said.append(
            f"Checks: {len(checks) - len(wrong)} right, {len(wrong)} wrong{''.join(f', {name}' for name in wrong)}.\n"
        )
    ran = sorted({f"{row['shape']}, random weights" for row in rows if "shape" in row})
    where = sorted(
        {f"{row['device']}, torch {row['torch']}, commit {row.get('commit') or 'not recorded'}" for row in rows}
    )
    return "\n".join([*said, "; ".join(ran + where) + "\n"])


def _table(title: str, rows: list[Row], head: Any, names: Sequence[str]) -> str:
    """One column a row of the file, one line a figure."""
    lines = [f"| {title} | " + " | ".join(head(row) for row in rows) + " |", "| :-- |" + " --: |" * len(rows)]
    for name in names:
        if any(name in row for row in rows):
            cells = (f"{row[name]:.4g}" if name in row else "-" for row in rows)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
