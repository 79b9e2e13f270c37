"""What a user gets: the wheel holds every module and data file of the four packages, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvbench.recipes import names

ROOT = Path(__file__).parents[2]
PACKAGES = {"kvbench": ".", "kvbench_policies": "policies", "kvbench_tasks": "tasks", "kvbench_recipes": "recipes"}
SHIPPED = {".py", ".toml", ".json", ".jsonl", ".safetensors", ".typed"}
OFFLINE = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since building leaves files beside the source; what a checkout has that no distribution needs stays."""
    pytest.importorskip("setuptools", reason="building without a network needs setuptools here")
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for package, where in PACKAGES.items():
        shutil.copytree(ROOT / where / package, folder / where / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build([sys.executable, "-m", "pip", "wheel", *OFFLINE, "--wheel-dir", str(folder), str(source)], source)
    (built,) = folder.glob("kvbench-*.whl")
    return built


@pytest.fixture(scope="module")
def members(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def build(line: list[str], folder: Path) -> None:
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_missing(members: set[str]) -> None:
    expected = {
        str(path.relative_to(ROOT / where))
        for package, where in PACKAGES.items()
        for path in (ROOT / where / package).rglob("*")
        if path.suffix in SHIPPED
    }
    assert expected - members == set()


def test_nothing_else_is_installed(members: set[str]) -> None:
    roots = {member.split("/")[0] for member in members}
    assert {name for name in roots if not name.endswith(".dist-info")} == set(PACKAGES)
    assert [member for member in members if "__pycache__" in member or member.endswith((".log", ".tmp"))] == []


def test_what_the_main_command_needs_is_there(members: set[str]) -> None:
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {f"kvbench/models/ref/{name}" for name in model} <= members
    # Which policies have to ship one is for tests/contract/test_checkpoints.py to say.
    for folder in (ROOT / "policies/kvbench_policies/checkpoints/ref").iterdir():
        inside = f"kvbench_policies/checkpoints/ref/{folder.name}"
        assert {f"{inside}/kvbench_policy.json", f"{inside}/adapted_lm.safetensors"} <= members, folder.name
    for kind in ("suites", "train"):
        assert names(kind)
        assert {f"kvbench_recipes/{kind}/{name}.toml" for name in names(kind)} <= members


def test_the_source_distribution_builds_the_same_wheel(source: Path, members: set[str], tmp_path: Path) -> None:
    program = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    build([sys.executable, "-c", program], source)
    (archive,) = tmp_path.glob("kvbench-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert (unpacked / "LICENSE").is_file()
    build([sys.executable, "-m", "pip", "wheel", *OFFLINE, "--wheel-dir", str(tmp_path), str(unpacked)], tmp_path)
    (again,) = tmp_path.glob("kvbench-*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == members
