"""Rules for every module: short, found in one place, named for what it holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvbench
import kvbench_policies
import kvbench_tasks

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("kvbench", "policies", "tasks", "recipes") for path in (ROOT / folder).rglob("*.py")
)
LONGEST = 500


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_too_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_every_folder_of_modules_is_a_package() -> None:
    assert [str(path.parent) for path in SOURCES if not (path.parent / "__init__.py").exists()] == []


def test_no_module_is_named_for_nothing() -> None:
    assert not {"utils", "helpers", "misc", "common"} & {path.stem for path in SOURCES}


def test_every_module_says_what_it_holds() -> None:
    silent = [str(p.relative_to(ROOT)) for p in SOURCES if not p.read_text(encoding="utf-8").lstrip().startswith('"""')]
    assert not silent


def test_nothing_is_pickled() -> None:
    """A pickle runs code when it is read; weights are safetensors and everything else is JSON, TOML or Parquet."""
    pickling = re.compile(r"torch\.(?:load|save)\(|^\s*(?:import|from) (?:pickle|joblib|dill|shelve)\b", re.M)
    assert [str(path) for path in SOURCES if pickling.search(path.read_text(encoding="utf-8"))] == []


def test_the_packages_come_from_one_installation() -> None:
    """`python -m pytest` from the root mixes the source tree with an installed wheel; `pytest` does not."""
    installed = {"site-packages" in str(package.__file__) for package in (kvbench, kvbench_policies, kvbench_tasks)}
    assert len(installed) == 1
