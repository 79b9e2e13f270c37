"""The command line as a process among others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "kvbench", "list", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    errors = writer.stderr.read()
    writer.stderr.close()
    assert writer.wait(timeout=60) in (0, 1)
    assert errors == ""
