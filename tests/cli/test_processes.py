"""Cells side by side in processes: the same rows, and a worker's death loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import Kvbench

SPEED = {"ms_per_step", "tokens_per_s", "environment"}


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows by key, without what differs from run to run."""
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text("utf-8").splitlines()]
    return {row["key"]: {name: value for name, value in row.items() if name not in SPEED} for row in rows}


def test_two_processes_write_the_rows_of_one(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    grid = ["run", "--policy", "random", "--policy", "tova", "--cr", "0.75", "--task", "chain", "--task", "stack"]
    grid += ["--model", str(tiny), "--gen-len", "128", "--limit", "2"]
    assert kvbench(*grid, "--out", tmp_path / "one")[0] == 0
    assert kvbench(*grid, "--out", tmp_path / "two", "--processes", "2", "--threads", "2")[0] == 0
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "two")
    lines = (tmp_path / "two" / "results.jsonl").read_text("utf-8").splitlines()
    environments = [json.loads(line)["environment"] for line in lines]
    assert {(one["processes"], one["threads"]) for one in environments} == {(2, 1)}


def children_of(process: int) -> list[int]:
    """Processes that measure cells for this one."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text("utf-8").split()
    return [int(one) for one in found if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers through /proc")
def test_a_dead_worker_is_one_sentence_and_finished_cells_stay(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    grid = ["run", "--policy", "random", "--policy", "tova", "--cr", "0.75", "--model", str(tiny)]
    grid += ["--gen-len", "128", "--limit", "8", "--out", str(out)]
    command = [sys.executable, "-m", "kvbench", *grid, "--processes", "2", "--threads", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    results = out / "results.jsonl"
    while not (results.exists() and results.read_text("utf-8")):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(children_of(process.pid)[0], signal.SIGKILL)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert "One of 2 processes died" in errors
    assert "--processes 1" in errors
    before = rows_of(out)
    assert 0 < len(before) < 18
    assert kvbench(*grid)[0] == 0
    after = rows_of(out)
    assert len(after) == 18
    assert before.items() <= after.items()
