from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.report.load import load
from kvbench.report.paired import paired
from kvbench.rows import GRADES, RESULTS, write_grades

Make = Callable[..., Any]
KEPT = {"policy": "tova", "slots": 19, "cr": "7/8"}


def write(folder: Path, *pairs: Any) -> Path:
    folder.mkdir()
    (folder / RESULTS).write_text("".join(row.to_json() + "\n" for row, _ in pairs))
    write_grades(folder / GRADES, [grade for _, grades in pairs for grade in grades])
    return folder


def test_shards_make_one_table(tmp_path: Path, make_row: Make) -> None:
    one = write(tmp_path / "1", make_row([1, 0], **KEPT))
    two = write(tmp_path / "2", make_row([1, 1]))
    assert [row.relative for row in paired(load([one]))] == [None]
    assert [row.relative for row in paired(load([one, two]))] == [0.5, 1.0]
    assert [row.relative for row in paired(load([two, one]))] == [1.0, 0.5]


def test_a_cell_that_several_folders_hold_counts_once_and_the_measured_one_wins(tmp_path: Path, make_row: Make) -> None:
    row, grades = make_row([1, 0], **KEPT)
    failed = write(tmp_path / "1", (replace(row, status="failed", score=None), []))
    first = write(tmp_path / "2", (row, grades))
    second = write(tmp_path / "3", (replace(row, score=0.9), grades))
    stored = load([failed, first, second])
    assert [(r.status, r.score) for r in stored.rows] == [("ok", 0.5)]
    assert len(stored.grades[row.key]) == 2


def test_a_half_written_last_line_is_not_a_row(tmp_path: Path, make_row: Make) -> None:
    folder = write(tmp_path / "1", make_row([1, 1]), make_row([1, 0], **KEPT))
    path = folder / RESULTS
    path.write_text(path.read_text()[:-20])
    assert [row.policy for row in load([folder]).rows] == ["full"]


def test_a_folder_without_rows(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"holds no rows \(results\.jsonl\)"):
        load([tmp_path])
