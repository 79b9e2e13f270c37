"""`kvbench run` with a trained policy: its checkpoint, its own dense twin, and everything that can be wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvbench.models.checkpoint import MANIFEST, SCORER, Checkpoint, build_policy, make_scorers
from kvbench.models.open import open_model
from kvbench.plugins import load_registry
from kvbench.rows import read_results

Kvbench = Callable[..., tuple[int, str, str]]

SMALL = ("--task", "chain", "--gen-len", 128, "--limit", 2, "--threads", 1)


@pytest.fixture
def checkpoint(tiny: Path, tmp_path: Path) -> Path:
    """Untrained scorers and an LM that differs from the base model."""
    loaded = open_model(str(tiny), load_registry(), torch.device("cpu"), torch.float32)
    policy = build_policy(load_registry().policy("kvpop_mlp"), {"window": 4})
    scorers = make_scorers(policy, loaded.geometry)
    assert scorers is not None
    Checkpoint(
        policy_name="kvpop_mlp",
        parameters={"window": 4},
        base_model="tiny",
        weights_hash=loaded.weights_hash,
        geometry=loaded.geometry,
        trained_budgets={},
        recipe={},
        training={},
        scorer_weights=scorers.state_dict(),
        lm_weights={name: value * 1.5 for name, value in loaded.model.named_parameters()},
    ).save(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_it_runs_beside_both_dense_twins(kvbench: Kvbench, tiny: Path, checkpoint: Path, tmp_path: Path) -> None:
    line = (
        "--policy",
        "kvpop-mlp",
        "--policy",
        "random",
        "--budget",
        40,
        "--checkpoint",
        checkpoint,
        "--dense-adapted",
    )
    code, text, errors = kvbench("run", "--model", tiny, *line, *SMALL, "--out", tmp_path / "runs")
    assert (code, errors) == (0, "")
    assert "full @kvpop_mlp" in text
    rows = read_results(tmp_path / "runs")
    assert [(row.policy, row.role) for row in rows] == [
        ("full", "dense"),
        ("random", "policy"),
        ("full", "dense_adapted"),
        ("kvpop_mlp", "policy"),
    ]
    assert [row.status for row in rows] == ["ok"] * 4, [row.reason for row in rows]
    trained = Checkpoint.load(checkpoint)
    assert [row.checkpoint for row in rows] == [None, None, None, trained.hash]
    assert [row.adapted_lm for row in rows] == [None, None, trained.hash, trained.hash]
    assert rows[3].scorer_bytes is not None


def test_any_policy_runs_on_an_adapted_lm(kvbench: Kvbench, tiny: Path, checkpoint: Path, tmp_path: Path) -> None:
    line = ("--policy", "random", "--budget", 40, "--adapted-lm", checkpoint, "--dense-adapted")
    assert kvbench("run", "--model", tiny, *line, *SMALL, "--out", tmp_path / "runs")[0] == 0
    records = json.loads(kvbench("table", tmp_path / "runs", "--format", "json")[1])
    assert [record["role"] for record in records] == ["dense", "dense_adapted", "policy"]
    assert records[2]["adapted_lm"] == records[1]["adapted_lm"] is not None


def another_model(folder: Path) -> None:
    change(folder, "weights_hash", "0" * 64)


def damaged(folder: Path) -> None:
    data = bytearray((folder / SCORER).read_bytes())
    data[-1] ^= 1
    (folder / SCORER).write_bytes(data)


def another_format(folder: Path) -> None:
    change(folder, "format_version", 99)


def another_policy(folder: Path) -> None:
    change(folder, "policy_name", "kvpop")


def incomplete(folder: Path) -> None:
    (folder / SCORER).unlink()


def not_json(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


def change(folder: Path, name: str, value: object) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (another_model, "is for model 'tiny' with weights 000000000000"),
        (damaged, "is damaged"),
        (another_format, "format version 99"),
        (another_policy, "A checkpoint of policy 'kvpop' was given, but it does not run"),
        (incomplete, "is missing"),
        (not_json, "is damaged: it is not JSON"),
    ],
)
def test_a_wrong_checkpoint_is_one_sentence(
    kvbench: Kvbench, tiny: Path, checkpoint: Path, tmp_path: Path, spoil: Callable[[Path], None], sentence: str
) -> None:
    spoil(checkpoint)
    line: tuple[object, ...] = (
        "--policy",
        "kvpop_mlp",
        "--policy",
        "random",
        "--budget",
        40,
        "--checkpoint",
        checkpoint,
    )
    if spoil is another_policy:
        line = line[2:]
    code, text, errors = kvbench("run", "--model", tiny, *line, *SMALL, "--out", tmp_path / "runs")
    assert (code, text) == (2, "")
    assert sentence in errors
    assert errors.count("\n") == 1


def test_what_training_fixed_cannot_be_changed(kvbench: Kvbench, tiny: Path, checkpoint: Path, tmp_path: Path) -> None:
    line = ("--policy", "kvpop_mlp", "--budget", 40, "--checkpoint", checkpoint, "--policy-arg", "window=8")
    code, _, errors = kvbench("run", "--model", tiny, *line, *SMALL, "--out", tmp_path / "runs")
    assert code == 2
    assert "'window' of policy 'kvpop_mlp' is fixed by its checkpoint" in errors
