from __future__ import annotations

from pathlib import Path

import pytest

from kvbench import recipes
from kvbench.core.errors import KvbenchError


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shipped"
    (folder / "suites").mkdir(parents=True)
    (folder / "suites" / "reference-v1.toml").write_text("")
    monkeypatch.setattr(recipes, "files", lambda _: folder)
    return folder


def test_the_shipped_folders_are_where_the_package_says() -> None:
    assert recipes.folder("suites").parent.name == "kvbench_recipes"


def test_a_suite_is_found_by_name(shipped: Path) -> None:
    assert recipes.find("reference-v1", "suites") == shipped / "suites" / "reference-v1.toml"
    assert recipes.find("reference_v1", "suites") == shipped / "suites" / "reference-v1.toml"


def test_a_suite_is_found_by_path(shipped: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("")
    assert recipes.find(mine, "suites") == mine


def test_a_misspelt_suite_gets_near_misses(shipped: Path) -> None:
    with pytest.raises(KvbenchError, match="no suite named 'reference-v2'; did you mean 'reference-v1'"):
        recipes.find("reference-v2", "suites")


def test_a_missing_file_is_named(shipped: Path) -> None:
    with pytest.raises(KvbenchError, match=r"no suite file nowhere\.toml; give a TOML file or one of: reference-v1\."):
        recipes.find("nowhere.toml", "suites")


def test_no_training_recipe_of_that_name(shipped: Path) -> None:
    with pytest.raises(KvbenchError, match="no training recipe is registered"):
        recipes.find("kvpop", "train")
