from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvbench.core.cell import Cell
from kvbench.core.errors import KvbenchError
from kvbench.core.result import Environment, GradeRecord, Result

ENVIRONMENT = Environment(
    python="3", torch="2", transformers="5", kvbench="0", dirty=None, platform="x", device_name="y", threads=1
)


def test_a_row_survives_json(cell: Callable[..., Cell]) -> None:
    row = replace(Result.of(cell(), "ok"), score=0.5, alarms=("slow",), environment=ENVIRONMENT)
    assert Result.from_json(row.to_json()) == row
    assert "\n" not in row.to_json()


def test_what_is_missing_is_null(cell: Callable[..., Cell]) -> None:
    record = json.loads(Result.of(cell(), "skipped", "too small").to_json())
    assert all(record[name] is None for name in ("score", "relative", "cr_mean", "kv_bytes", "tokens_per_s"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cr": "7/8"}, 0.875),
        ({"cr": "0.88"}, 0.88),
        ({"cr": None}, 0.5),
        ({"cr": None, "slots": None, "policy": "full"}, 0.0),
    ],
)
def test_the_requested_ratio_is_a_number(
    cell: Callable[..., Cell], changes: dict[str, object], expected: float
) -> None:
    assert Result.of(cell(**changes), "ok").cr == expected


def test_another_schema_is_refused(cell: Callable[..., Cell]) -> None:
    record = json.loads(Result.of(cell(), "ok").to_json())
    with pytest.raises(KvbenchError, match="schema version 2"):
        Result.from_json(json.dumps({**record, "schema_version": 2}))
    with pytest.raises(KvbenchError, match="lacks the fields"):
        Result.from_json(json.dumps({**record, "colour": 1}))
    with pytest.raises(KvbenchError, match="schema version None"):
        Result.from_json("[]")


@pytest.mark.parametrize("record", [Result, GradeRecord, Environment, Cell])
def test_every_field_is_documented(record: type) -> None:
    entries = re.findall(r"^ {8}([a-z_, ]+):", record.__doc__ or "", re.MULTILINE)
    documented = {name for entry in entries for name in entry.split(", ")}
    assert {field.name for field in dataclasses.fields(record)} <= documented
