"""The benchmark of training costs runs where there is no GPU, on a model of a few thousand parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_part_leaves_its_rows(tmp_path: Path) -> None:
    sizes = ["--length", "128", "--lengths", "128", "--prompt", "128", "--slots", "48", "--repeats", "1"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.training",
        "--shape",
        "small",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["part"] for row in rows] == ["pass", "prefill", "prefill", "prefill", "step", "step"]
    dense, kvpop = rows[-2:]
    assert (dense["kind"], kvpop["kind"]) == ("dense", "kvpop")
    assert kvpop["to dense"] == kvpop["step s"] / dense["step s"]
    parts = {"teacher", "scorer", "cut-off", "attention", "target", "boundary loss"}
    assert {f"forward/{part} s" for part in parts} <= kvpop.keys()
    # Target and cut-offs are not computed again in the backward pass.
    assert not {"backward/target s", "backward/cut-off s"} & kvpop.keys()


def test_the_plain_path_runs_kvbench_without_kernels() -> None:
    # A machine that has kernels, and a command that asks for them; importlib mode hides `benchmarks` from this process.
    program = """
import torch
from benchmarks.training import plain
from kvbench.cli import main
from kvbench.kernels import attention, check

check.available = lambda tensor: True
query = torch.zeros(1, 32)
main.COMMANDS = (("ask", lambda: print(attention.has_kernel(query))), *main.COMMANDS)
plain.main(["ask"])
main.main(["ask"])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
