from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.efficiency.record import ROWS, read_rows
from tests.cli.conftest import Kvbench

ASKED = ("--policy", "streaming-llm", "--cr", "0.5", "--gen-len", 32, "--gen-len", 64, "--steps", 3, "--device", "cpu")


def test_measure_show_and_plot(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    out, picture = tmp_path / "rows", tmp_path / "lengths.svg"
    code, told, error = kvbench("efficiency", "--shape", tiny / "config.json", *ASKED, "--out", out)
    assert (code, error) == (0, "")
    assert "6 cells" in told
    assert "[6/6] streaming_llm 0.5 length 64 batch 1: " in told
    rows = read_rows(out)
    assert {row.cell.model for row in rows} == {"tiny"}
    code, shown, _ = kvbench("table", out)
    assert code == 0
    assert shown in told
    assert kvbench("table", out, "--format", "csv")[1].count("\n") == 7
    code, crossings, _ = kvbench("plot-efficiency", out, "--out", picture)
    assert code == 0
    assert "streaming_llm 0.5: full is slower from length" in crossings
    drawn = picture.read_text()
    assert all(text in drawn for text in ("tiny, batch 1", "ms a step", "peak memory, GiB", "streaming_llm 0.5"))
    assert kvbench("plot-efficiency", out, "--out", picture, "--batch", 7)[2].startswith("error: None of the rows")


def test_a_model_with_real_weights_is_labelled(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    line = ("efficiency", "--shape", tiny, *ASKED, "--no-dense", "--no-stock", "--no-scoring", "--audit")
    assert kvbench(*line, "--out", tmp_path / "rows")[0] == 0
    assert {(row.cell.weights, row.cell.audited) for row in read_rows(tmp_path / "rows")} == {("real", True)}


def test_wrong_input_is_one_sentence_and_leaves_no_folder(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows"
    code, _, error = kvbench("efficiency", "--shape", tiny, "--policy", "kvpob", "--cr", "0.5", "--out", out)
    assert (code, error.count("error: ")) == (2, 1)
    assert not out.exists()
    code, _, error = kvbench("table", tmp_path)
    assert code == 2
    (tmp_path / ROWS).write_text("{\n")
    code, _, error = kvbench("table", tmp_path)
    assert (code, "is not JSON" in error) == (2, True)
