from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.efficiency.record import ROWS, EfficiencyCell, EfficiencyResult, Figures, read_rows
from tests.efficiency.samples import CELL, ENVIRONMENT, row


def test_a_row_survives_the_way_to_the_disk_and_back() -> None:
    written = row(32, 2.5, "kvpop", slots=16, cr="0.5", scorer="random")
    assert EfficiencyResult.from_json(written.to_json()) == written
    failed = EfficiencyResult(
        cell=CELL, status="out_of_memory", reason="full", command="c", commit="d", environment=ENVIRONMENT
    )
    assert EfficiencyResult.from_json(failed.to_json()) == failed
    assert json.loads(failed.to_json())["ms_per_step"] is None


def test_the_key_covers_what_can_change_a_number_and_nothing_else() -> None:
    assert replace(CELL, cr="0.50").key == CELL.key
    changed = {
        "batch_asked": 2,
        "gen_length": 64,
        "policy": "tova",
        "decode_path": "plain",
        "steps": 4,
        "device_name": "other",
    }
    keys = {replace(CELL, **{name: value}).key for name, value in changed.items()}  # type: ignore[arg-type]  # any field
    assert len(keys | {CELL.key}) == len(changed) + 1


def test_the_newest_row_of_a_cell_counts_and_half_a_line_does_not(tmp_path: Path) -> None:
    old, new = row(32, 2.0), row(32, 3.0)
    (tmp_path / ROWS).write_text(old.to_json() + "\n" + new.to_json() + "\n" + old.to_json()[:50])
    assert read_rows(tmp_path) == [new]


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "is not JSON"), ("{}", "schema version None"), ('{"schema_version": 1}', "lacks")]
)
def test_a_strange_line_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / ROWS).write_text(text + "\n")
    with pytest.raises(KvbenchError, match=sentence):
        read_rows(tmp_path)
    with pytest.raises(KvbenchError, match="holds no rows"):
        read_rows(tmp_path / "nowhere")


def test_every_field_of_a_row_is_explained() -> None:
    document = (Path(__file__).parents[2] / "docs" / "efficiency.md").read_text(encoding="utf-8")
    text = document.partition("## Every field of a row")[2]
    explained = {name for cell in re.findall(r"^\| (`.*?`) \|", text, re.M) for name in re.findall(r"`(\w+)`", cell)}
    fields = {field.name for kind in (EfficiencyCell, Figures) for field in dataclasses.fields(kind)}
    assert explained == fields | {"schema_version", "key", "status", "reason", "command", "commit", "environment"}
