from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

Kvbench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def runs(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> Path:
    out = tmp_path / "runs"
    line = ("--policy", "random", "--budget", 40, "--task", "chain", "--gen-len", 128, "--limit", 2, "--threads", 1)
    assert kvbench("run", "--model", tiny, *line, "--out", out)[0] == 0
    return out


def test_every_format_has_every_cell(kvbench: Kvbench, runs: Path) -> None:
    records = json.loads(kvbench("table", runs, "--format", "json")[1])
    assert [record["policy"] for record in records] == ["full", "random"]
    assert [row["policy"] for row in csv.DictReader(io.StringIO(kvbench("table", runs, "--format", "csv")[1]))] == [
        "full",
        "random",
    ]
    for form in ("text", "md"):
        code, text, errors = kvbench("table", runs, "--format", form)
        assert (code, errors) == (0, "")
        assert "random" in text
        assert "40 slots" in text


def test_an_empty_folder_is_named(kvbench: Kvbench, tmp_path: Path) -> None:
    code, text, errors = kvbench("table", tmp_path)
    assert (code, text) == (2, "")
    assert f"The folder {tmp_path} holds no rows" in errors


def test_a_format_that_does_not_exist(kvbench: Kvbench, tmp_path: Path) -> None:
    code, _, errors = kvbench("table", tmp_path, "--format", "pdf")
    assert code == 2
    assert "pdf" in errors
