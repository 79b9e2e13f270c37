from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.core.errors import KvbenchError
from kvbench.engine import compare as comparing
from kvbench.engine.compare import compare
from kvbench.engine.layer import Layer
from kvbench.engine.path import choose, require
from kvbench.engine.run import Setting, contact
from kvbench_policies.tova import Tova
from tests.engine.tiny import load

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="torch for CPUs comes without triton")
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="triton's interpreter takes arrays of one element for numbers",
)
def test_the_kernels_by_triton_s_interpreter() -> None:
    """benchmarks/decode/correctness.py lists what is compared; on a GPU `test_the_compiled_kernels` runs all of it."""
    script = Path(__file__).with_name("interpreted_decode.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiled_kernels(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.decode", "--only", "correctness", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def setting() -> Setting:
    loaded = load("qwen3")
    return Setting(loaded, Tova(), Tova().split(20, loaded.geometry), None)


def test_a_cpu_decodes_plainly_and_refuses_the_rest() -> None:
    chosen = choose(setting(), 2)
    assert (chosen.name, chosen.captured, chosen.setting.kernels) == ("plain", False, False)
    for path in ("graph", "kernels"):
        with pytest.raises(KvbenchError, match=f"^The decode path '{path}' needs a CUDA device; this model is on cpu"):
            require(path, setting().loaded)


@pytest.mark.parametrize("what", ["attention", "positions", "priority"])
def test_a_step_that_goes_wrong_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain step stands in for kernels, with one number off."""
    plainly = Layer.decode

    def decode(layer: Layer, *given: object) -> torch.Tensor:
        kernels, layer.kernels = layer.kernels, False
        out = plainly(layer, *given)  # type: ignore[arg-type] # what the test does not look at
        if kernels and what == "attention":
            out = out * 1.1
        elif kernels and what == "positions":
            layer.slots.positions[:, :, 1] += 1
        elif kernels:
            layer.slots.priority[:, :, 1] = 7.0
        layer.kernels = kernels
        return out

    monkeypatch.setattr(Layer, "decode", decode)
    monkeypatch.setattr(comparing, "_STEPS", 1)
    with torch.inference_mode(), contact(setting().loaded), pytest.raises(KvbenchError, match=r"^The decode kernels"):
        compare(setting(), 3)
