"""What a user gets: the wheel holds every module and data file of the four packages, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"kvbench": ".", "kvbench_policies": "policies", "kvbench_tasks": "tasks", "kvbench_recipes": "recipes"}
SHIPPED = {".py", ".toml", ".json", ".jsonl", ".safetensors", ".typed"}


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    pytest.importorskip("setuptools", reason="building a wheel without a network needs setuptools here")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # Building leaves files beside the source, so it happens on a copy.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package, where in PACKAGES.items():
        shutil.copytree(ROOT / where / package, source / where / package, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    line = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("kvbench-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_nothing_is_missing(members: set[str]) -> None:
    expected = {
        str(path.relative_to(ROOT / where))
        for package, where in PACKAGES.items()
        for path in (ROOT / where / package).rglob("*")
        if path.suffix in SHIPPED
    }
    assert expected - members == set()


def test_nothing_else_is_installed(members: set[str]) -> None:
    names = {member.split("/")[0] for member in members}
    assert {name for name in names if not name.endswith(".dist-info")} == set(PACKAGES)
