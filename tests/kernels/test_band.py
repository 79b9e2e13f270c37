from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="torch for CPUs comes without triton")
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="triton's interpreter takes arrays of one element for numbers",
)
def test_the_kernel_by_triton_s_interpreter() -> None:
    """tests/kernels/test_gpu.py runs it compiled."""
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
