from __future__ import annotations

import csv
import io
import json

import pytest

from kvbench.efficiency.crossing import crossing, lines, told
from kvbench.efficiency.record import EfficiencyResult
from kvbench.efficiency.tables import render
from tests.efficiency.samples import CELL, ENVIRONMENT, row

ROWS = [
    row(100, 1.0),
    row(300, 5.0),
    row(100, 2.0, "kvpop", slots=25, cr="3/4", scorer="random", policy_args="window=4"),
    row(300, 3.0, "kvpop", slots=75, cr="3/4", scorer="random", policy_args="window=4"),
    EfficiencyResult(
        cell=CELL, status="out_of_memory", reason="it is full", command="c", commit=None, environment=ENVIRONMENT
    ),
]


def test_the_crossing_lies_between_lengths() -> None:
    # Dense is 1 below at 100 and 2 above at 300: a third of the way.
    assert crossing([(100, 1.0), (300, 5.0)], [(100, 2.0), (300, 3.0)]) == pytest.approx(100 + 200 / 3)
    assert told([(100, 1.0), (300, 5.0)], [(100, 0.5), (300, 1.0)]) == "at most 100"
    assert told([(100, 1.0), (300, 5.0)], [(100, 2.0), (300, 6.0)]) == "not up to 300"
    assert told([(100, 1.0)], [(200, 1.0)]) == "-"


def test_rows_that_differ_in_the_length_are_one_line() -> None:
    dense, kvpop = lines(ROWS)
    assert (dense.label, dense.dense, dense.ms) == ("full", True, ((100, 1.0), (300, 5.0)))
    assert (kvpop.label, kvpop.removed, kvpop.memory) == ("kvpop", "3/4", ((100, 10000), (300, 30000)))


def test_text_and_markdown_say_the_same() -> None:
    text, markdown = render(ROWS), render(ROWS, "md")
    for shown in (text, markdown):
        assert "tiny, random weights, float32 on abacus, medians of at least 3 steps" in shown
        assert "2.000 [1.900, 2.200]" in shown
        assert "1.67" in shown  # dense takes 5 milliseconds at 300, kvpop 3
        assert "full length 32 batch 1: out of memory: it is full" in shown
        assert "kvpop runs with window=4" in shown
        assert "random scorers: cost only" in shown
        assert "167" in shown
    assert max(map(len, text.splitlines())) <= 150


def test_every_field_of_every_row_is_there_for_scripts() -> None:
    records = json.loads(render(ROWS, "json"))
    table = list(csv.DictReader(io.StringIO(render(ROWS, "csv"))))
    assert len(records) == len(table) == len(ROWS)
    assert list(records[0]) == list(table[0])
    assert (records[3]["ms_per_step"], table[3]["ms_per_step"]) == (3.0, "3.0")
    assert (records[4]["ms_per_step"], table[4]["ms_per_step"]) == (None, "")
    assert records[0]["torch"] == "2"
    assert json.loads(table[0]["curve"]) == [[100, 1.0]]
