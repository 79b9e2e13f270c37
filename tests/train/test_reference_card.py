"""The dense scores that are published are those that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.train.reference_card import CARD, card, dense_table, main, write_card

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "kvbench" / "models" / "ref"
DOCUMENT = ROOT / "docs" / "reference_tasks.md"

SCORES = json.loads((MODEL / "eval.json").read_text(encoding="utf-8"))["scores"]


def test_the_table_says_what_was_measured() -> None:
    scores = [
        {"task": "chain", "level": 256, "dtype": "float32", "exact": 0.98},
        {"task": "chain", "level": 128, "dtype": "float32", "exact": 1.0},
        {"task": "chain", "level": 256, "dtype": "bfloat16", "exact": 0.9749},
    ]
    assert list(dense_table(scores)) == [
        "| task | compute | 128 | 256 |",
        "|---|---|---|---|",
        "| chain | fp32 | 1.000 | 0.980 |",
        "| chain | bf16 |  | 0.975 |",
    ]


def test_the_document_has_the_measured_table() -> None:
    assert "\n".join(dense_table(SCORES)) in DOCUMENT.read_text(encoding="utf-8")


def test_the_shipped_card_is_the_generated_one() -> None:
    summary, evaluation, config = (
        json.loads((MODEL / name).read_text(encoding="utf-8"))
        for name in ("training_summary.json", "eval.json", "config.json")
    )
    assert (MODEL / CARD).read_text(encoding="utf-8") == card(summary, evaluation, config)


def test_the_dense_model_is_as_good_as_the_tasks_ask() -> None:
    assert {row["n"] for row in SCORES} == {200}
    assert len(SCORES) == 6 * 6 * 2
    for row in SCORES:
        assert row["exact"] >= (0.98 if row["level"] <= 2048 else 0.95)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("training_summary.json", "eval.json", "config.json"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    main(["--table", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == list(dense_table(SCORES))
    assert not (tmp_path / CARD).exists()
    write_card(tmp_path)
    main([str(tmp_path)])
    assert (tmp_path / CARD).read_bytes() == (MODEL / CARD).read_bytes()
