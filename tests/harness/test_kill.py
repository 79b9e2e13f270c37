"""Kill -9 at any moment, run again: nothing twice, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kvbench.rows import COMPLETIONS, RESULTS, read_grades, read_results

CELLS = 12
# A run with an executor that takes a moment, dawdles inside the writes too, and logs each cell that it computes.
PROGRAM = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from kvbench.core.cell import Cell
from kvbench.core.result import GradeRecord, Result
from kvbench.data.lock import Lock
from kvbench.harness import store
from kvbench.harness.execute import Outcome
from kvbench.harness.plan import Plan, Planned
from kvbench.harness.session import Session, run_session

folder = Path(sys.argv[1])
append = store.append_lines

def slow(path, lines):
    text = "".join(f"{line}\\n" for line in lines)
    for part in (text[: len(text) // 2], text[len(text) // 2 :]):
        with path.open("a") as file:
            file.write(part)
        time.sleep(0.01)

store.append_lines = slow

class Slow:
    def execute(self, planned, progress=None, grading=None):
        key = planned.cell.key
        time.sleep(0.01)
        grades = [
            GradeRecord(key=key, problem=f"p{i}", sample=0, correct=1.0, steps_correct=1.0, tokens=1, finished=True,
                        near_ties=0, digest="d")
            for i in range(3)
        ]
        completions = tuple(
            store.CompletionRecord(grade=g, task="t", task_version=1, gen_length=8, text="x" * 50) for g in grades
        )
        with (folder.parent / "computed").open("a") as log:
            log.write(key + "\\n")
        return Outcome(Result.of(planned.cell, "ok"), completions)

cells = [
    Cell(model="m", weights_hash="w", policy="random", task="t", task_version=1, gen_length=8, slots=slots, cr=None,
         reference_length=99, problems=3, samples=1, seed=0, dtype="float32", device="cpu", rows=1)
    for slots in range(1, 13)
]
plan = tuple(Planned(cell, None, False) for cell in cells)
settings = store.Settings(model="m", weights_hash="w", problems=3, samples=1, seeds=(0,), temperature=0.0, top_p=1.0,
                          top_k=0, dtype="float32", device="cpu", rows=1, attention="auto", measurement=1, schema=1)
print("ready", flush=True)
for _ in sys.stdin:  # imports take longer than runs: each line starts a fresh process of this one
    child = os.fork()
    if child == 0:
        run_session(Session(SimpleNamespace(out=folder, processes=1), Plan(plan, plan), Slow(), settings, Lock(folder)))
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Starter:
    """Starts runs as processes that can be killed."""

    def __init__(self, folder: Path) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready"

    def start(self) -> int:
        assert self._parent.stdin is not None
        self._parent.stdin.write("go\n")
        self._parent.stdin.flush()
        return int(self._read())

    def exit_code(self) -> int:
        return int(self._read())

    def close(self) -> None:
        self._parent.communicate()

    def _read(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    log = tmp_path / "computed"
    runs = Starter(folder)
    for delay in (0.0, 0.015, 0.03, 0.045):
        target = _lines(log) + 2
        process = runs.start()
        # Each kill falls into another part of a write, two computed cells later.
        while _lines(log) < target:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)
        assert runs.exit_code() == -signal.SIGKILL
        assert len(read_results(folder)) < CELLS
    kept = {row.key for row in read_results(folder)}
    before = Counter(log.read_text().split())
    runs.start()
    assert runs.exit_code() == 0
    runs.close()
    computed = Counter(log.read_text().split()) - before
    assert kept, "the kills came too early to test anything"
    assert not kept & computed.keys()
    rows = [json.loads(line)["key"] for line in (folder / RESULTS).read_text().splitlines()]
    assert len(rows) == len(set(rows)) == CELLS
    lines = [json.loads(line) for line in (folder / COMPLETIONS).read_text().splitlines()]
    assert Counter(line["key"] for line in lines) == dict.fromkeys(rows, 3)
    assert Counter(grade.key for grade in read_grades(folder)) == dict.fromkeys(rows, 3)
