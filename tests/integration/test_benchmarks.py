"""The benchmarks run; how long they take is measured elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_benchmark_runs_once_on_a_cpu() -> None:
    # -P: without it the source tree would stand before an installed wheel.
    line = [sys.executable, "-P", "-m", "pytest", "benchmarks", "-q", "--benchmark-disable", "-k", "ref-cpu"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*line, "-p", "no:cacheprovider"], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
