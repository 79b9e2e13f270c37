from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.core.errors import KvbenchError
from kvbench.efficiency import session as session_module
from kvbench.efficiency.measure import measure
from kvbench.efficiency.options import CheckedEfficiency
from kvbench.efficiency.record import ROWS, EfficiencyResult, Figures, read_rows
from kvbench.efficiency.session import open_session, run_session
from kvbench.plugins import load_registry

SPEED = 1e9

POLICIES = tuple(load_registry().policies)

Checked = Callable[..., CheckedEfficiency]


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring it takes half a second every time."""
    monkeypatch.setattr(session_module, "bandwidth", lambda _: SPEED)


def run(checked: CheckedEfficiency) -> list[EfficiencyResult]:
    return run_session(open_session(checked, load_registry()))


def figures(row: EfficiencyResult) -> Figures:
    assert row.figures is not None, row.reason
    return row.figures


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_that_ships_is_measured(checked: Checked, policy: str) -> None:
    (row,) = run(checked((policy,), {"crs": ("0.25",)}))
    found = figures(row)
    assert (row.status, row.cell.policy, row.cell.weights) == ("ok", policy, "random")
    assert (found.path, found.n, found.memory, found.workspace_bytes) == ("plain", 3, "counted", None)
    assert found.ms_lo <= found.ms_per_step <= found.ms_hi
    assert found.floor_ratio == pytest.approx(found.ms_per_step / found.floor_ms)
    moved = found.moved_weights + found.moved_kv + found.moved_metadata + found.moved_scorer + found.moved_state
    assert found.floor_ms == pytest.approx(1000 * moved / SPEED)
    assert found.tokens_per_s == pytest.approx(1000 / found.ms_per_step)
    assert found.prefill_ms is not None
    assert found.peak_memory == (
        found.weights_bytes + found.kv_bytes + found.scorer_bytes + found.metadata_bytes + found.state_bytes
    )
    learned = load_registry().policies[policy].learned and policy != "streaming_llm_plus"
    assert row.cell.scorer == ("random" if learned else None)
    assert (found.scorer_bytes > 0) == learned


def test_what_was_measured_is_not_measured_again_and_what_failed_is(
    checked: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Figures:
        raise ZeroDivisionError("no")

    asked = checked(("knorm", "streaming_llm"))
    with monkeypatch.context() as patch:
        patch.setattr(session_module, "measure", fail)
        assert [(row.status, row.reason) for row in run(asked)] == [("failed", "ZeroDivisionError: no")] * 2
    first = run(asked)
    assert {row.status for row in first} == {"ok"}
    # A killed run leaves half a line.
    with (tmp_path / "rows" / ROWS).open("a") as file:
        file.write('{"schema_ver')
    assert run(asked) == first
    more = run(checked(("knorm", "streaming_llm", "random")))
    assert more[:2] == first
    assert len(read_rows(tmp_path / "rows")) == 3


def test_running_out_of_memory_is_a_row_and_the_next_cell_goes_on(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(subject: object, cell: object, batch: int, *more: object, **named: object) -> Figures:
        if batch == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n a lot")
        return measure(subject, cell, batch, *more, **named)  # type: ignore[arg-type]  # handed on

    monkeypatch.setattr(session_module, "measure", scarce)
    asked = checked(("knorm",), batches=(4, 1))
    rows = run(asked)
    assert [row.status for row in rows] == ["out_of_memory", "ok"]
    assert rows[0].reason == "CUDA out of memory. Tried to allocate a lot"
    monkeypatch.setattr(session_module, "measure", measure)
    # It is a finding, not an accident: it is not tried again.
    assert run(asked) == rows


def test_stock_dense_and_scoring_stand_beside_a_policy(checked: Checked) -> None:
    rows = run(checked(("kvpop",), {"crs": ("0.25",)}, stock=True, dense=True, scoring=True))
    assert [(row.cell.source.partition(" ")[0], row.cell.policy) for row in rows] == [
        ("transformers", "full"),
        ("kvbench", "full"),
        ("kvbench", "kvpop"),
    ]
    stock, dense, kvpop = map(figures, rows)
    assert dense.entries == 48 - 4  # the steps that were left over
    assert stock.entries == dense.entries
    assert stock.moved_weights == dense.moved_weights
    assert stock.moved_kv == dense.moved_kv
    assert dense.scoring_ms is None
    assert kvpop.baseline_ms is not None
    assert kvpop.scoring_ms == pytest.approx(kvpop.ms_per_step - kvpop.baseline_ms)


def test_the_stated_heads_fill_a_policy_without_a_bound(checked: Checked) -> None:
    (row,) = run(checked(("dms",), {"gen_lens": (200,), "reference_length": 200}))
    found = figures(row)
    assert found.head_lengths is not None
    lengths = [length for layer in found.head_lengths for length in layer]
    # Half of 200 tokens, filled when 10 of them are still to come; 20 of the newest and first are always there.
    assert sum(lengths) / len(lengths) == pytest.approx(20 + (100 - 20) / (200 - 20) * (190 - 20), abs=1)
    assert len(set(lengths)) > 1
    assert max(lengths) < found.capacity <= max(lengths) + 30
    assert row.cell.heads == "lognormal(sigma=0.6)"


def test_a_generation_in_full_is_compared_with_its_steps(checked: Checked) -> None:
    (row,) = run(checked(("full",), points=3, whole=True))
    found = figures(row)
    assert [length for length, _ in found.curve] == [16, 32, 48]
    assert found.generation_s is not None
    assert found.whole_s is not None
    assert found.whole_ratio == pytest.approx(found.whole_s / found.generation_s)
    assert found.whole_setup_s == 0
    (a, x), (b, y), (c, z) = found.curve
    assert found.generation_s == pytest.approx((a * x + (b - a) * (x + y) / 2 + (c - b) * (y + z) / 2) / 1000)


def test_the_largest_batch_of_a_policy_is_larger_than_that_of_dense(checked: Checked) -> None:
    kib = 2**-20
    rows = run(
        checked(("streaming_llm",), {"gen_lens": (64,), "crs": ("7/8",)}, largest=True, memory=200 * kib, dense=True)
    )
    dense, policy = map(figures, rows)
    assert [row.cell.batch_asked for row in rows] == [None, None]
    assert dense.batch < policy.batch
    assert policy.peak_memory <= 200 * 1024 < policy.peak_memory * (policy.batch + 1) / policy.batch
    assert (dense.capacity, policy.capacity) == (65, 8)


def test_hyper_parameters_come_from_a_recipe_and_the_command_line(checked: Checked) -> None:
    asked = checked(
        ("kvpop", "streaming_llm"), {"policy_args": ("window=4", "decay=fixed")}, recipe="ref", scoring=False
    )
    rows = run(replace(asked, run=replace(asked.run, gen_lens=(300,))))
    assert rows[0].cell.policy_args == "window=4,hidden=128,decay=fixed"
    assert rows[1].cell.policy_args == ""


def test_a_recipe_has_the_hyper_parameters_of_the_one_that_it_extends(checked: Checked) -> None:
    extends, extended = (checked(("kvpop",), recipe=name).parameters for name in ("qwen3-8b", "qwen3-4b"))
    assert extends == extended
    assert extends["window"] == 256


@pytest.mark.parametrize(
    ("run_options", "options", "sentence"),
    [
        ({"model": "qwen3-5b"}, {}, "There is no shape or model named 'qwen3-5b'; known: .*qwen3-4b"),
        ({"model": "nowhere.json"}, {}, "There is no configuration file nowhere.json"),
        ({"gen_lens": (10,)}, {}, "None of the 1 cells can run. The first: Length 10 is too short to time 3 steps"),
        ({"crs": ("0.99",)}, {}, "Policy 'streaming_llm' needs a budget of at least 6 slots"),
        ({"policy_args": ("windw=3",)}, {}, "None of the policies takes the argument 'windw'"),
        ({}, {"steps": 0}, "--steps is 0; it has to be at least 1"),
        ({}, {"batches": (0,)}, "--batch is 0"),
        ({}, {"memory": 1.0}, "--memory limits the largest batch; add --largest"),
        ({}, {"recipe": "qwen"}, "There is no training recipe named 'qwen'"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    checked: Checked, run_options: dict[str, object], options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(KvbenchError, match=sentence):
        run(checked(("streaming_llm",), run_options, **options))
