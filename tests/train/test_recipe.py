from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.recipes import folder, names
from kvbench.train.recipe import Recipe
from kvbench.train.reference_recipe import ReferenceRecipe


def test_the_recipe_that_ships_is_the_default() -> None:
    assert Recipe.load("ref") == Recipe()


def test_json_and_back() -> None:
    recipe = Recipe(steps=7, crs=("7/8",), levels={512: 2.0})
    assert Recipe().replace(recipe.as_json()) == recipe


def test_a_file_changes_only_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('steps = 10\ncrs = ["7/8"]\n[levels]\n512 = 3\n')
    assert Recipe.load(path) == Recipe(steps=10, crs=("7/8",), levels={512: 3.0})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"step": 3}, "There is no recipe setting named 'step'; did you mean 'steps'"),
        ({"steps": 0}, "'steps' is 0; it has to be at least 1"),
        ({"steps": 1.5}, "'steps' cannot be 1.5: it is a whole number"),
        ({"steps": "many"}, "'steps' cannot be 'many'"),
        ({"steps": True}, "'steps' cannot be True: true and false are for switches"),
        ({"crs": "0.75"}, "'crs' cannot be '0.75': it is a list"),
        ({"crs": ["1.5"]}, "outside 0 <= cr < 1"),
        ({"crs": []}, "at least one level with a positive weight and one compression ratio"),
        ({"levels": {}}, "at least one level with a positive weight and one compression ratio"),
        ({"levels": {"long": 1}}, "'levels' cannot be"),
        ({"betas": [0.9]}, "'betas' cannot be"),
        ({"target_power": 0}, "'target_power' is 0.0; it has to be above 0"),
        ({"normaliser": "both"}, "'normaliser' is 'both'; write 'dense' or 'sparse'"),
        ({"group": "sum"}, "'group' is 'sum'; write 'max' or 'mean'"),
        ({"margin": -1}, "'margin' is -1.0; it has to be at least 0"),
        ({"accumulation": 0}, "'accumulation' is 0; it has to be at least 1"),
        ({"data": {"path": "x.jsonl"}, "tasks": ["chain"]}, "A recipe has 'tasks' or 'data', not both"),
    ],
)
def test_wrong_settings_are_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KvbenchError) as error:
        Recipe().replace(settings)
    assert sentence in str(error.value)


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("steps: 3")
    with pytest.raises(KvbenchError, match="is not TOML"):
        Recipe.load(path)


def test_learning_rates_rise_stay_and_fall() -> None:
    recipe = Recipe(steps=1000, warmup=50, decay=0.4, final_lr=0.05)
    assert recipe.lr_factor(0) == pytest.approx(1 / 50)
    assert recipe.lr_factor(49) == recipe.lr_factor(599) == 1
    assert recipe.lr_factor(800) == pytest.approx(0.05 + 0.95 / 2)
    assert recipe.lr_factor(999) == pytest.approx(0.05, abs=0.003)


def test_the_lm_can_keep_its_learning_rate() -> None:
    recipe = Recipe(steps=1000, warmup=50, lm_schedule="constant")
    assert recipe.lm_factor(0) == recipe.lm_factor(999) == 1
    assert recipe.lr_factor(0) == pytest.approx(1 / 50)
    assert Recipe(steps=1000).lm_factor(800) == Recipe(steps=1000).lr_factor(800)


def test_a_file_extends_another(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("steps = 10\nmargin = 2.0\n")
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\nsteps = 20\n')
    (tmp_path / "ours.toml").write_text('extends = "ref"\ncount = false\n')
    assert Recipe.load(tmp_path / "mine.toml") == Recipe(steps=20, margin=2.0)
    assert Recipe.load(tmp_path / "ours.toml") == Recipe(count=False)
    (tmp_path / "base.toml").write_text('extends = "mine.toml"\n')
    with pytest.raises(KvbenchError, match="extends itself"):
        Recipe.load(tmp_path / "mine.toml")


def test_single_settings_from_text() -> None:
    given = Recipe(data={"path": "a.jsonl", "split": "train"})
    changed = given.assigned(["normaliser=sparse", "margin=0", "count=false", "data.split=test", 'crs=["7/8"]'])
    assert changed == Recipe(
        normaliser="sparse", margin=0.0, count=False, crs=("7/8",), data={"path": "a.jsonl", "split": "test"}
    )
    with pytest.raises(KvbenchError, match="'margin' is not KEY=VALUE"):
        given.assigned(["margin"])
    with pytest.raises(KvbenchError, match="no recipe setting named 'marign'"):
        given.assigned(["marign=1"])


@pytest.mark.parametrize("name", names("train"))
def test_recipes_that_ship_load(name: str) -> None:
    if name.startswith("reference-lm"):
        assert ReferenceRecipe.from_file(folder("train") / f"{name}.toml").steps > 0
    else:
        Recipe.load(name)
