"""Published tables are what their rows say, and the pages about them quote them rightly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from kvbench.efficiency.record import read_rows
from kvbench.efficiency.tables import render as efficiency
from kvbench.models.checkpoint import Checkpoint, find_checkpoint
from kvbench.models.huggingface import hash_files
from kvbench.report.load import load
from kvbench.report.tables import render

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
CHECKPOINTS = ROOT / "policies" / "kvbench_policies" / "checkpoints" / "ref"
MODEL = ROOT / "kvbench" / "models" / "ref"


@pytest.mark.parametrize("form", ["md", "csv"])
def test_the_reference_table_is_made_from_its_rows(form: Literal["md", "csv"]) -> None:
    stored = load(sorted((RESULTS / "reference-v1").glob("shard-*")))
    assert len(stored.rows) == 396
    assert {row.n for row in stored.rows} == {200}
    assert len({row.commit for row in stored.rows}) == 1
    assert all(row.commit and row.environment for row in stored.rows)
    assert (RESULTS / "reference-v1" / f"table.{form}").read_text("utf-8") == render(stored, form)


def test_the_reference_rows_are_of_the_model_and_the_checkpoints_that_ship() -> None:
    stored = load(sorted((RESULTS / "reference-v1").glob("shard-*")))
    named = {row.checkpoint: row.policy for row in stored.rows if row.checkpoint}
    shipped = {Checkpoint.load(find_checkpoint(policy, "ref")).hash: policy for policy in named.values()}
    assert named.keys() == shipped.keys()
    assert {row.adapted_lm for row in stored.rows if row.adapted_lm} <= shipped.keys()
    assert {row.weights_hash for row in stored.rows} == {hash_files(MODEL)}


@pytest.mark.parametrize("form", ["md", "csv"])
def test_the_smollm2_table_is_made_from_its_rows_and_quoted(form: Literal["md", "csv"]) -> None:
    folder = RESULTS / "needles-smollm2"
    stored = load([folder])
    assert len(stored.rows) == 80
    assert {(row.task == "longtext", row.n) for row in stored.rows} == {(False, 50), (True, 20)}
    assert len({row.commit for row in stored.rows}) == 1
    assert all(row.commit and row.environment for row in stored.rows)
    table = (folder / f"table.{form}").read_text("utf-8")
    assert table == render(stored, form)
    if form == "md":
        section = (RESULTS / "README.md").read_text("utf-8").split("## What needles-smollm2 says")[1].split("\n## ")[0]
        quotes = re.findall(r"^\| (\w+) \| (\d\.\d.*?) \| (.*?) \| (.*?) \|$", section, re.M)
        assert len(quotes) == 5
        for policy, *quoted in quotes:
            for removed, cell in zip(("0.5", "0.75", "7/8"), quoted, strict=True):
                assert f"| {policy} | {removed} | 200 | {cell} |" in table


@pytest.mark.parametrize("form", ["md", "csv"])
def test_the_ablation_table_is_made_from_its_rows(form: Literal["md", "csv"]) -> None:
    stored = load(sorted(folder for folder in (RESULTS / "ablation").iterdir() if folder.is_dir()))
    assert {(row.n, row.gen_length, row.cr_requested) for row in stored.rows} == {(200, 1024, None), (200, 1024, "7/8")}
    assert (RESULTS / "ablation" / f"table.{form}").read_text("utf-8") == render(stored, form)


def test_the_table_of_paths_is_made_from_its_rows_and_quoted() -> None:
    folder = RESULTS / "ablation-paths"
    names = [f"{path}-{seed}" for path in ("fast", "plain") for seed in range(4)]
    dense, trainings = RESULTS / "ablation" / "full", [folder / name for name in names]
    command = [sys.executable, "-m", "benchmarks.training.paths", *map(str, [dense, *trainings])]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (folder / "table.md").read_text("utf-8") == said
    stored = load([dense, *trainings])
    assert len({row.checkpoint for row in stored.rows if row.checkpoint}) == len(names)
    assert (folder / "table.csv").read_text("utf-8") == render(stored, "csv")
    readme = (RESULTS / "README.md").read_text("utf-8")
    spread = said[said.index("| path |") :]
    assert spread[: spread.index("\n\n")] in readme
    figures = re.findall(r"-?0\.\d{3,}(?: \[.*?])?", spread[spread.index("\n\n") :])
    assert len(figures) == 2
    assert all(figure in readme for figure in figures)


@pytest.mark.parametrize("policy", ["dms", "kvpop", "kvpop_linear", "kvpop_mlp", "streaming_llm_plus"])
def test_the_recall_quoted_is_that_of_the_checkpoint(policy: str) -> None:
    training = json.loads((CHECKPOINTS / policy / "kvbench_policy.json").read_text("utf-8"))["training"]
    values = [training["by_cr"][cr]["recall"] for cr in ("3/4", "7/8", "15/16")] + [training["recall"]]
    line = f"| {policy} | " + " | ".join(f"{value:.3f}" for value in values) + " |"
    assert line in (RESULTS / "README.md").read_text("utf-8")
    logged = (RESULTS / "training" / "ref" / f"{policy}.jsonl").read_text("utf-8").splitlines()
    assert json.loads(logged[-1])["evaluation"]["recall"] == training["recall"]


def test_the_efficiency_table_is_made_from_its_rows() -> None:
    folder = RESULTS / "efficiency"
    rows = [row for file in sorted(folder.glob("*/efficiency.jsonl")) for row in read_rows(file.parent)]
    assert all(row.commit and row.environment for row in rows)
    # As `kvbench table` does: of a cell that was measured twice the last counts.
    once = {row.key: row for row in rows}
    assert (folder / "table.md").read_text("utf-8") == efficiency(list(once.values()), "md")


def test_the_table_of_training_costs_is_made_from_its_rows() -> None:
    folder = RESULTS / "training-cost"
    command = [sys.executable, "-m", "benchmarks.training", "--table"]
    command += [str(folder / f"{part}.jsonl") for part in ("steps", "passes", "prefill", "checks")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (folder / "table.md").read_text("utf-8") == said
