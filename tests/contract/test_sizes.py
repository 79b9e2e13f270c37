"""The repository stays small enough to clone: trained weights have a limit, and so has every file."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("kvbench", "policies", "tasks", "recipes", "results", "docs", "tests")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".npz"}


def files() -> list[Path]:
    return [path for folder in SHIPPED for path in (ROOT / folder).rglob("*") if path.is_file()]


def test_all_weights_together_are_at_most_30_mb() -> None:
    weights = [path for path in files() if path.suffix in WEIGHTS]
    assert any(path.name == "model.safetensors" for path in weights)
    assert sum(path.stat().st_size for path in weights) <= 30e6


def test_no_file_is_larger_than_16_mb() -> None:
    assert [str(path.relative_to(ROOT)) for path in files() if path.stat().st_size > 16e6] == []


def test_the_reference_model_is_at_most_6_mb() -> None:
    assert (ROOT / "kvbench/models/ref/model.safetensors").stat().st_size <= 6e6
