"""What has to be quick must not import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from kvbench.cli.main import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "pandas", "scipy", "pyarrow"} & set(sys.modules)
print(f"heavy: {sorted(heavy)}", file=sys.stderr)
sys.exit(code)
"""

LINES = [
    ["--help"],
    ["--version"],
    ["list"],
    ["list", "--json"],
    ["describe", "kvpop"],
    ["describe", "ledger"],
    ["describe", "nix"],
]


def commands() -> list[str]:
    from kvbench.cli.main import COMMANDS

    return [name for name, _ in COMMANDS]


@pytest.mark.parametrize("line", [*LINES, *([name, "--help"] for name in commands())], ids=" ".join)
def test_the_command_leaves_torch_alone(line: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *line], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == (2 if "nix" in line else 0), done.stderr
    assert done.stderr.splitlines()[-1] == "heavy: []"
