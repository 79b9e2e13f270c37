"""A tiny shape as a file, and checked options for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.efficiency.options import CheckedEfficiency, EfficiencyOptions, check_efficiency
from kvbench.harness.options import RunOptions
from kvbench.plugins import load_registry
from tests.efficiency.samples import TINY


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shapes") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def checked(tiny: Path, tmp_path: Path) -> Callable[..., CheckedEfficiency]:
    def make(policies: tuple[str, ...], run: dict[str, object] | None = None, **more: object) -> CheckedEfficiency:
        shared: dict[str, object] = {
            "crs": ("0.5",),
            "gen_lens": (48,),
            "model": str(tiny),
            "out": tmp_path / "rows",
            "device": "cpu",
            **(run or {}),
        }
        defaults: dict[str, object] = {"steps": 3, "prompt": 8, "stock": False, "dense": False, "scoring": False}
        options = EfficiencyOptions(
            run=RunOptions(policies=policies, **shared),  # type: ignore[arg-type]  # any option
            **{**defaults, **more},  # type: ignore[arg-type]  # any option
        )
        return check_efficiency(options, load_registry())

    return make
