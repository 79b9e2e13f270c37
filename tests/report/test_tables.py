from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from kvbench.report.load import Stored
from kvbench.report.tables import frame, only, render

SCRIPTS_RELY_ON = [
    "model",
    "policy",
    "task",
    "task_version",
    "gen_length",
    "cr",
    "budget",
    "n",
    "samples",
    "score",
    "score_lo",
    "score_hi",
    "relative",
    "relative_lo",
    "relative_hi",
    "steps_correct",
    "cr_mean",
    "cr_peak",
    "kv_bytes",
    "scorer_bytes",
    "prefill",
    "ms_per_step",
    "tokens_per_s",
    "peak_memory",
    "truncated",
    "status",
    "reason",
    "alarms",
    "commit",
    "device",
    "dtype",
    "seed",
]


def test_json_is_one_object_a_cell(grid: Stored) -> None:
    records = json.loads(render(grid, "json"))
    assert len(records) == len(grid.rows)
    assert all(name in record for name in SCRIPTS_RELY_ON for record in records)
    dense, *_, skipped, failed = records
    assert (dense["relative"], dense["budget"], dense["cr"]) == (1.0, None, 0.0)
    assert (skipped["status"], skipped["reason"], skipped["score"]) == ("skipped", "Too small.", None)
    assert (failed["status"], failed["cr"], failed["budget"], failed["relative"]) == ("failed", 0.875, 19, None)


def test_csv_has_the_same_rows_and_leaves_missing_values_empty(grid: Stored) -> None:
    records = list(csv.DictReader(io.StringIO(render(grid, "csv"))))
    assert len(records) == len(grid.rows)
    assert all(name in records[0] for name in SCRIPTS_RELY_ON)
    assert records[0]["budget"] == records[-1]["score"] == ""
    assert records[-1]["budget"] == "19"


def test_the_frame_keeps_integers_and_marks_what_is_missing(grid: Stored) -> None:
    table = frame(grid)
    assert list(table.columns)[:3] == ["key", "twin_key", "role"]
    assert table["budget"].dtype == "Int64"
    assert table["score"].dtype == "Float64"
    assert pd.isna(table["score"].iloc[-1])
    assert table.loc[table["policy"] == "tova", "relative"].tolist() == [pytest.approx(1 / 3)] * 2


def test_an_empty_frame_has_the_columns() -> None:
    table = frame(Stored((), {}))
    assert len(table) == 0
    assert set(SCRIPTS_RELY_ON) <= set(table.columns)


def lines_of(text: str, first: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.startswith(first)]


def test_text_has_a_line_a_policy_with_the_held_out_family_apart(grid: Stored) -> None:
    text = render(grid, "text")
    assert "tiny, float32 on cpu, greedy, length 128, 4 problems a task, seed 0" in text
    heading = next(line for line in text.splitlines() if line.startswith("policy"))
    assert heading.split()[-2:] == ["score", "steps"]
    assert "held-out [95 %]" in heading
    assert "of LM" in heading
    quality, cost, by_task = lines_of(text, "tova")
    assert quality[:4] == ["tova", "7/8", "4", "0.333"]
    assert cost == ["tova", "7/8", "0.700", "0.800", "2.0", "KiB", "0", "B", "1.5", "100"]
    assert by_task == ["tova", "7/8", "0.333", "0.333"]
    assert lines_of(text, "full @kvpop")
    assert lines_of(text, "policy")[-1] == ["policy", "removed", "chain", "ledger*"]


def test_text_explains_itself_within_its_width(grid: Stored) -> None:
    text = render(grid, "text")
    for word in ("relative: ", "held-out: ", "full @P: ", "removed: "):
        assert text.count(f"\n{word}") == 1
    assert max(map(len, text.splitlines())) <= 100


def test_losing_failed_and_skipped_cells_stay_visible(grid: Stored) -> None:
    for form in ("text", "md"):
        text = render(grid, form)
        assert "skipped: Too small: streaming_llm 0.98 (chain)" in text
        assert "failed: It broke: random 7/8 (chain)" in text
        assert "random" in text


def test_an_alarm_in_many_cells_is_one_short_line(
    make_row: Callable[..., Any], make_stored: Callable[..., Stored]
) -> None:
    tasks = ("chain", "codebook", "program", "stack")
    dense = [make_row([1] * 4, task=task) for task in tasks]
    slow = []
    for task in tasks:
        for policy, slots in (("tova", 19), ("random", 19), ("random", 38)):
            row, grades = make_row([1, 1, 0, 0], task=task, policy=policy, slots=slots, cr=None)
            slow.append((replace(row, tokens_per_s=50.0), grades))
    text = render(make_stored(*dense, *slow))
    assert "! slower than dense: 12 cells (random 8, tova 4)" in text
    text = render(make_stored(*dense, *[pair for pair in slow if pair[0].policy == "tova"]))
    assert "! slower than dense: tova 19 slots (4 tasks)" in text


def test_lengths_are_tables_of_their_own_short_ones_first(
    make_row: Callable[..., Any], make_stored: Callable[..., Stored]
) -> None:
    text = render(make_stored(make_row([1] * 4, gen_length=512), make_row([1] * 4)))
    assert text.index("length 128") < text.index("length 512")


def test_markdown_is_tables(grid: Stored) -> None:
    rows = [line for line in render(grid, "md").splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
    assert "| :-- | --: |" in rows[1]


def test_pooling_stacks_problems(make_row: Callable[..., Any], make_stored: Callable[..., Stored]) -> None:
    eight = {"problems": 8}
    kept = {"policy": "tova", "slots": 19, "cr": "7/8", **eight}
    stored = make_stored(
        make_row([1] * 8, **eight),
        make_row([1] * 8, task="stack", **eight),
        make_row([0] * 4 + [1] * 4, **kept),
        make_row([1] * 8, task="stack", **kept),
    )
    quality, *_ = lines_of(render(stored), "tova")
    assert quality[2:4] == ["16", "0.750"]


def test_the_base_model_comes_first_whatever_closed_first(grid: Stored) -> None:
    text = render(Stored(tuple(reversed(grid.rows)), grid.grades))
    lines = [line.split("  ")[0] for line in text.splitlines() if line.startswith(("full  ", "full @k", "tova"))]
    assert lines == ["full", "full @kvpop", "tova"] * 3


def test_the_same_slots_are_one_line_whatever_the_ratio(
    make_row: Callable[..., Any], make_stored: Callable[..., Stored]
) -> None:
    slots = {"policy": "tova", "slots": 40, "cr": None}
    pairs = [
        *(make_row([1] * 4, task=task, reference_length=length) for task, length in (("chain", 150), ("stack", 160))),
        *(
            make_row([1] * 4, task=task, reference_length=length, **slots)
            for task, length in (("chain", 150), ("stack", 160))
        ),
    ]
    quality, *_ = lines_of(render(make_stored(*pairs)), "tova")
    assert quality[:4] == ["tova", "40", "slots", "8"]


def test_other_conditions_are_other_tables(make_row: Callable[..., Any], make_stored: Callable[..., Stored]) -> None:
    text = render(make_stored(make_row([1] * 4), make_row([1] * 4, dtype="bfloat16")))
    assert "tiny, float32 on cpu" in text
    assert "tiny, bfloat16 on cpu" in text


def test_without_side_file_there_are_no_relative_numbers(grid: Stored) -> None:
    bare = Stored(grid.rows, {row.key: [] for row in grid.rows})
    assert [row["relative"] for row in json.loads(render(bare, "json")) if row["policy"] == "tova"] == [None, None]
    assert "tova" in render(bare)


def test_a_runs_rows_come_with_their_twins_only(grid: Stored) -> None:
    keys = {row.key for row in grid.rows if row.policy == "kvpop"}
    assert [row.policy for row in only(grid, keys).rows] == ["full", "full", "kvpop"]


def test_a_large_table_still_fits(make_row: Callable[..., Any], make_stored: Callable[..., Stored]) -> None:
    tasks = ("chain", "codebook", "ledger", "program", "recurrence", "stack")
    rows = []
    for task in tasks:
        shared = {"task": task, "held_out": task == "ledger", "problems": 200, "cr": "0.875"}
        trained = {"adapted_lm": "s", "checkpoint": "s"}
        half = [1] * 100 + [0] * 100
        rows += [
            make_row(half, **(shared | {"cr": None})),
            make_row(half, adapted_lm="s", **(shared | {"cr": None})),
            make_row(half, policy="streaming_llm_plus", slots=19, **trained, **shared),
        ]
    text = render(make_stored(*rows))
    assert max(map(len, text.splitlines())) <= 100
    assert lines_of(text, "full @streaming_llm_plus")[0][:4] == ["full", "@streaming_llm_plus", "0", "1000"]
