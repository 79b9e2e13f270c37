"""Published tables are what their rows say, and the pages about them quote them rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from kvbench.report.load import load
from kvbench.report.tables import render

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
CHECKPOINTS = ROOT / "policies" / "kvbench_policies" / "checkpoints" / "ref"


@pytest.mark.parametrize("form", ["md", "csv"])
def test_the_reference_table_is_made_from_its_rows(form: Literal["md", "csv"]) -> None:
    stored = load(sorted((RESULTS / "reference-v1").glob("shard-*")))
    assert len(stored.rows) == 192
    assert {row.n for row in stored.rows} == {200}
    assert (RESULTS / "reference-v1" / f"table.{form}").read_text("utf-8") == render(stored, form)


@pytest.mark.parametrize("form", ["md", "csv"])
def test_the_ablation_table_is_made_from_its_rows(form: Literal["md", "csv"]) -> None:
    stored = load(sorted(folder for folder in (RESULTS / "ablation").iterdir() if folder.is_dir()))
    assert {(row.n, row.gen_length, row.cr_requested) for row in stored.rows} == {(200, 1024, None), (200, 1024, "7/8")}
    assert (RESULTS / "ablation" / f"table.{form}").read_text("utf-8") == render(stored, form)


@pytest.mark.parametrize("policy", ["kvpop", "kvpop_mlp", "streaming_llm_plus"])
def test_the_recall_quoted_is_that_of_the_checkpoint(policy: str) -> None:
    training = json.loads((CHECKPOINTS / policy / "kvbench_policy.json").read_text("utf-8"))["training"]
    values = [training["by_cr"][cr]["recall"] for cr in ("3/4", "7/8")] + [training["recall"]]
    line = f"| {policy} | " + " | ".join(f"{value:.3f}" for value in values) + " |"
    assert line in (RESULTS / "README.md").read_text("utf-8")
    logged = (RESULTS / "training" / "ref" / f"{policy}.jsonl").read_text("utf-8").splitlines()
    assert json.loads(logged[-1])["evaluation"]["recall"] == training["recall"]
