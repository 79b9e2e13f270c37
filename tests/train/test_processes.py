"""Two processes are one training: the same curve as one process, within rounding."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.models.checkpoint import Checkpoint
from kvbench.models.source import LoadedModel
from kvbench.train.resume import LOG, STATE
from tests.train.launched import RECIPE, TOML, trainer

TOLERANCE = 1e-4
"""Largest difference of a loss, norm or measurement at any step: sums in another order, in fp32."""


def _log(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def _same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() - {"tokens_per_s"}
        return keys == other.keys() - {"tokens_per_s"} and all(_same(one[key], other[key]) for key in keys)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < TOLERANCE
    return one == other


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def test_two_processes_follow_the_curve_of_one(make_tiny: Callable[[], LoadedModel], tmp_path: Path) -> None:
    loaded = make_tiny()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    model, both = str(tmp_path / "model"), tmp_path / "both"
    both.mkdir()
    (both / "recipe.toml").write_text(TOML)
    both_of_them = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("launched.py")), model, str(both), str(_free_port())],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    # Meanwhile, alone.
    assert trainer(model, "kvpop_mlp", RECIPE, tmp_path / "kvpop_mlp").train() is not None
    assert trainer(model, "dms", replace(RECIPE, accumulation=2), tmp_path / "dms").train() is not None
    code = both_of_them.wait(timeout=120)
    told = [(both / f"told-{rank}").read_text() for rank in range(2)]
    assert code == 0, "\n".join(told)
    # The first process speaks for both.
    assert "step 4/4 kl 0." in told[0]
    assert "step 4/4" not in told[1]
    for name, folder in (("kvpop_mlp", "replicated"), ("dms", "sharded")):
        mine, theirs = _log(tmp_path / name), _log(both / folder)
        assert len(mine) == len(theirs) == 6
        for one, other in zip(mine, theirs, strict=True):
            assert _same(one, other), (one, other)
        checkpoints = [Checkpoint.load(tmp_path / name), Checkpoint.load(both / folder)]
        for kind in ("scorer_weights", "lm_weights"):
            weights = [getattr(checkpoint, kind) for checkpoint in checkpoints]
            assert weights[0].keys() == weights[1].keys()
            for key, value in weights[0].items():
                # bf16 of the LM: a last bit may fall either way.
                assert (value.float() - weights[1][key].float()).abs().max() <= 1e-2 * value.float().abs().max() + 1e-4
        assert not (both / folder / STATE).exists()


@pytest.mark.parametrize("name", ["kvpop", "dms"])
def test_micro_batches_are_one_step(make_tiny: Callable[[], LoadedModel], tmp_path: Path, name: str) -> None:
    loaded = make_tiny()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    for accumulation in (1, 3):
        recipe = replace(RECIPE, accumulation=accumulation, steps=2, gate_weight=0.0)
        trainer(str(tmp_path / "model"), name, recipe, tmp_path / str(accumulation)).train()
    one, three = (_log(tmp_path / str(accumulation)) for accumulation in (1, 3))
    assert all(_same(mine, theirs) for mine, theirs in zip(one, three, strict=True)), (one, three)
