from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvbench as package
from kvbench.harness.execute import LocalExecutor
from kvbench.harness.options import Shard
from kvbench.rows import COMPLETIONS, read_grades, read_results

Kvbench = Callable[..., tuple[int, str, str]]

SMALL = ("--task", "chain", "--gen-len", 128, "--limit", 2, "--threads", 1)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_a_run_ends_with_a_table_and_rows(kvbench: Kvbench, tiny: Path, out: Path) -> None:
    line = (
        "run",
        "--model",
        tiny,
        "--policy",
        "streaming-llm",
        "--policy",
        "tova",
        "--cr",
        "7/8",
        *SMALL,
        "--out",
        out,
    )
    code, text, errors = kvbench(*line)
    assert (code, errors) == (0, "")
    for word in (
        "full",
        "streaming_llm",
        "tova",
        "relative [95 %]",
        "achieved",
        "fullest",
        "ms/step",
        "KV",
        "tokens/s",
        str(out),
    ):
        assert word in text
    rows = read_results(out)
    assert [row.policy for row in rows] == ["full", "streaming_llm", "tova"]
    assert all(row.status == "ok" and row.n == 2 and row.slots for row in rows)
    assert rows[1].cr_mean is not None
    assert rows[1].cr_mean > 0.5
    assert len(read_grades(out)) == 6

    before = (out / COMPLETIONS).read_bytes()
    code, text, _ = kvbench(*line)
    assert code == 0
    assert "3 of 3 cells were done before" in text
    assert (out / COMPLETIONS).read_bytes() == before

    code, _, errors = kvbench(*line, "--seed", 1)
    assert code == 2
    assert "holds another configuration (seeds [0] there, [1] here)" in errors

    code, text, _ = kvbench(*line, "--policy", "random")
    assert code == 0
    assert "3 of 4 cells were done before" in text


def test_shards_together_are_the_whole(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    line = ("run", "--model", tiny, "--policy", "random", "--budget", 40, "--budget", 20, *SMALL)
    kvbench(*line, "--out", tmp_path / "whole")
    parts = [tmp_path / "1", tmp_path / "2"]
    for index, part in enumerate(parts, start=1):
        assert kvbench(*line, "--shard", f"{index}/2", "--out", part)[0] == 0

    def table(*folders: Path) -> list[Any]:
        records = json.loads(kvbench("table", *folders, "--format", "json")[1])
        kept = ("key", "relative", "relative_lo", "score", "steps_correct", "cr_mean", "evictions")
        return sorted(tuple(record[name] for name in kept) for record in records)

    assert table(*(part for part in parts if (part / "results.jsonl").exists())) == table(tmp_path / "whole")


def test_a_shard_may_be_empty(kvbench: Kvbench, tiny: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "holds", lambda *_: False)
    code, text, _ = kvbench("run", "--model", tiny, "--policy", "random", "--budget", 40, *SMALL, "--out", out)
    assert (code, text) == (0, "This shard has none of the 2 cells.\n")


def test_a_dry_run_shows_the_plan_and_writes_nothing(kvbench: Kvbench, tiny: Path, out: Path) -> None:
    code, text, _ = kvbench(
        "run",
        "--model",
        tiny,
        "--policy",
        "streaming_llm",
        "--budget",
        40,
        "--budget",
        2,
        *SMALL,
        "--out",
        out,
        "--dry-run",
    )
    assert code == 0
    assert "skipped: " in text
    assert "3 cells, at most 512 new tokens" in text
    assert not out.exists()


def test_a_failed_cell_is_kept_the_others_go_on_and_the_exit_code_is_1(
    kvbench: Kvbench, tiny: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = LocalExecutor._measure

    def sometimes(self: LocalExecutor, planned: Any, *more: Any) -> Any:
        if planned.cell.policy == "tova":
            raise RuntimeError("out of memory")
        return measure(self, planned, *more)

    monkeypatch.setattr(LocalExecutor, "_measure", sometimes)
    line = ("run", "--model", tiny, "--policy", "tova", "--policy", "random", "--budget", 40, *SMALL, "--out", out)
    code, text, _ = kvbench(*line)
    assert code == 1
    assert "RuntimeError: out of memory" in text
    assert {row.policy: row.status for row in read_results(out)} == {"full": "ok", "tova": "failed", "random": "ok"}
    monkeypatch.undo()
    code, text, _ = kvbench(*line)
    assert code == 0
    assert "2 of 3 cells were done before" in text
    assert {row.status for row in read_results(out)} == {"ok"}


def test_a_skipped_cell_is_a_row(kvbench: Kvbench, tiny: Path, out: Path) -> None:
    line = ("run", "--model", tiny, "--policy", "streaming_llm", "--budget", 2, "--budget", 40, *SMALL, "--out", out)
    code, text, _ = kvbench(*line)
    assert code == 0
    assert "skipped: Policy 'streaming_llm' needs a budget of at least" in text
    assert sorted(row.status for row in read_results(out)) == ["ok", "ok", "skipped"]


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (("--policy", "tovaa", "--cr", "0.5"), ("no policy named 'tovaa'", "'tova'")),
        (("--policy", "tova", "--cr", "0.5", "--task", "chian"), ("no task named 'chian'", "'chain'")),
        (("--policy", "tova", "--cr", "0.5", "--model", "reff"), ("no model named 'reff'", "'ref'")),
        (("--policy", "tova", "--cr", "-0.5"), ("-0.5 is outside 0 <= cr < 1",)),
        (("--policy", "tova", "--cr", "1"), ("1 is outside 0 <= cr < 1",)),
        (("--policy", "tova", "--cr", "most"), ("'most' is not a number",)),
        (("--policy", "tova", "--cr", "0.5", "--budget", "64"), ("Both --cr and --budget",)),
        (("--policy", "tova"), ("no budget; give --cr",)),
        (("--cr", "0.5"), ("no policy; give --policy",)),
        (("--policy", "tova", "--cr", "0.5", "--suite", "nix"), ("no suite named 'nix'",)),
    ],
)
def test_wrong_names_and_numbers(
    kvbench: Kvbench, out: Path, arguments: tuple[str, ...], sentences: tuple[str, ...]
) -> None:
    refused(kvbench("run", *arguments, "--out", out), *sentences)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (("--policy", "streaming_llm", "--budget", "3"), ("'streaming_llm' needs a budget of at least", "has 3")),
        (("--policy", "streaming_llm", "--cr", "0.99"), ("'streaming_llm' needs a budget of at least",)),
        (("--policy", "kvpop", "--cr", "0.5"), ("no checkpoint for model 'tiny'", "kvbench train", "--checkpoint")),
        (("--policy", "random", "--cr", "0.5", "--gen-len", "512"), ("positions", "model 'tiny' has 400")),
        (("--policy", "random", "--cr", "0.5", "--gen-len", "100"), ("no problems of generation length 100",)),
        (("--policy", "streaming_llm", "--cr", "0.5", "--policy-arg", "sink=4"), ("named 'sink'", "'sinks'")),
        (("--policy", "kvpop", "--cr", "0.5", "--checkpoint", "nowhere"), ("no checkpoint folder nowhere",)),
    ],
)
def test_what_does_not_fit_the_model(
    kvbench: Kvbench, tiny: Path, out: Path, arguments: tuple[str, ...], sentences: tuple[str, ...]
) -> None:
    gen_len = () if "--gen-len" in arguments else ("--gen-len", 128)
    refused(kvbench("run", "--model", tiny, "--task", "chain", *gen_len, *arguments, "--out", out), *sentences)
    assert not out.exists()


@pytest.mark.parametrize("budgets", [("--budget", 3), ("--budget", 3, "--budget", 2)])
def test_every_cell_below_the_smallest_budget(
    kvbench: Kvbench, tiny: Path, out: Path, budgets: tuple[object, ...]
) -> None:
    answer = kvbench("run", "--model", tiny, "--policy", "streaming_llm", *budgets, "--gen-len", 128, "--out", out)
    refused(answer, "'streaming_llm' needs", "at least 6 slots", "3 slots")


def test_an_output_folder_that_cannot_be_written(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    answer = kvbench("run", "--model", tiny, "--policy", "random", "--cr", "0.5", *SMALL, "--out", tmp_path / "taken")
    refused(answer, "cannot be written", "--out")


def test_a_model_without_attention_interface(
    kvbench: Kvbench, tiny: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "_supports_attention_backend", False)
    answer = kvbench("run", "--model", tiny, "--policy", "random", "--cr", "0.5", *SMALL, "--out", out)
    refused(answer, "attention interface")


def refused(answer: tuple[int, str, str], *sentences: str) -> None:
    code, text, errors = answer
    assert (code, text) == (2, "")
    for sentence in sentences:
        assert sentence in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


def test_python_mirrors_the_command(tiny: Path, out: Path) -> None:
    from kvbench.api import load_results, run

    table = run(policy="random", cr="7/8", task="chain", gen_len=128, limit=2, model=str(tiny), out=out, threads=1)
    assert table["policy"].tolist() == ["full", "random"]
    assert table["cr"].tolist() == [0.0, 0.875]
    again = load_results(out)
    assert again.equals(table)
    assert package.__version__
