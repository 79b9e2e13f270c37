"""kvbench's command line with the plain forms of what training has kernels for, also on a GPU.

    python -m benchmarks.training.plain train --policy kvpop --model ref --out runs/plain

Everything else is `kvbench`. A whole training each way says more than one step of each: results/ablation-paths.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from unittest import mock

from kvbench.cli.main import main as kvbench
from kvbench.kernels import check


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of kvbench and return its exit code."""
    with mock.patch.object(check, "available", return_value=False):
        return kvbench(argv)


if __name__ == "__main__":
    sys.exit(main())
