"""Tasks of data sets through the command line, on local copies of the true schemas; nothing reaches a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.data.lock import LOCK
from kvbench.rows import COMPLETIONS, read_grades, read_results

Kvbench = Callable[..., tuple[int, str, str]]

DATA = Path(__file__).parents[1] / "data"
MATH = {"aime24": "parquet", "aime25": "jsonl", "gsm8k": "parquet", "hmmt_feb25": "parquet", "hmmt_nov25": "jsonl",
        "math500": "jsonl"}  # fmt: skip


def copy_of(task: str) -> Path:
    return DATA / f"{task}.{MATH[task]}"


def line(task: str, model: Path, out: Path, *more: object, gen_len: int = 16) -> tuple[object, ...]:
    base = ("run", "--task", task, "--data", f"{task}={copy_of(task)}", "--model", model, "--policy", "streaming-llm")
    return (*base, "--cr", "0.5", "--gen-len", gen_len, "--threads", 1, "--out", out, *more)


@pytest.mark.parametrize("task", MATH)
def test_every_task_runs(kvbench: Kvbench, talker: Path, tmp_path: Path, task: str) -> None:
    sampling = ("--limit", 2, "--samples", 2, "--temperature", 0.6)
    code, text, errors = kvbench(*line(task, talker, tmp_path, *sampling))
    assert (code, errors) == (0, "")
    assert "2 samples each" in text
    dense, policy = read_results(tmp_path)
    assert (dense.policy, policy.policy, policy.status, policy.n, policy.samples) == (
        "full", "streaming_llm", "ok", 2, 2,
    )  # fmt: skip
    assert policy.data_revision == dense.data_revision
    assert str(policy.data_revision).startswith("sha256:")
    assert len(str(policy.chat_template)) == 64
    assert json.loads((tmp_path / LOCK).read_text("utf-8")).popitem()[1] == policy.data_revision
    assert policy.n_requested is None
    assert len(read_grades(tmp_path)) == 8
    # The chat template of this model opens a reasoning block, so its answers are inside one.
    completions = [json.loads(text) for text in (tmp_path / COMPLETIONS).read_text("utf-8").splitlines()]
    assert all(completion["text"].startswith("<think>") for completion in completions)
    assert all(completion["extracted"] is None for completion in completions)


def test_a_model_without_a_chat_template_reads_the_prompt_as_it_is(
    kvbench: Kvbench, tiny: Path, tmp_path: Path
) -> None:
    assert kvbench(*line("aime25", tiny, tmp_path, "--limit", 1))[0] == 0
    assert {row.chat_template for row in read_results(tmp_path)} == {"plain"}


def test_more_problems_than_there_are_is_all_of_them(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    code, text, _ = kvbench(*line("hmmt_nov25", tiny, tmp_path, "--limit", 50, "--dry-run"))
    assert code == 0
    assert "hmmt_nov25 has 3 of 50 problems" in text
    code, text, _ = kvbench(*line("hmmt_nov25", tiny, tmp_path, "--limit", 50))
    assert code == 0
    assert "3 problems a task" in text
    assert {(row.n, row.n_requested) for row in read_results(tmp_path)} == {(3, 50)}


def test_a_dry_run_writes_nothing(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    assert kvbench(*line("aime25", tiny, tmp_path / "runs", "--dry-run"))[0] == 0
    assert list(tmp_path.iterdir()) == []


def refused(answer: tuple[int, str, str], *sentences: str) -> None:
    code, _, errors = answer
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    for sentence in sentences:
        assert sentence in errors


@pytest.mark.parametrize("task", MATH)
def test_without_a_copy_and_a_network_one_sentence_says_what_to_do(
    kvbench: Kvbench, tiny: Path, tmp_path: Path, task: str
) -> None:
    answer = kvbench("run", "--task", task, "--model", tiny, "--policy", "full", "--out", tmp_path)
    refused(answer, "cannot be read from the hub", f"give a local copy with --data {task}=PATH")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_changed_is_refused(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    text = copy_of("aime25").read_text("utf-8")
    copy.write_text(text, "utf-8")
    given = ("run", "--task", "aime25", "--data", f"aime25={copy}", "--model", tiny, "--policy", "full",
             "--gen-len", 4, "--limit", 1, "--out", tmp_path / "runs")  # fmt: skip
    assert kvbench(*given)[0] == 0
    copy.write_text(text.replace("twenty", "thirty"), "utf-8")
    refused(kvbench(*given), "'math-ai/aime25@test' is at revision sha256:", "locks it to sha256:")
    refused(kvbench(*(word for word in given if word not in ("--data", f"aime25={copy}"))), "locked to a local copy")


def test_a_missing_column_names_file_row_and_column(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_text('{"problem": "1 + 1?", "answer": "2"}\n{"problem": "1 + 2?", "anwser": "3"}\n', "utf-8")
    answer = kvbench("run", "--task", "aime25", "--data", f"aime25={copy}", "--model", tiny, "--policy", "full")
    refused(answer, f"Row 2 of {copy} has no value in column 'answer' or 'Answer'", "it has problem, anwser")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("aime25",), "The value of --data 'aime25' is not name=value"),
        (("aime25=nowhere.jsonl",), "There is no file or folder nowhere.jsonl"),
        (("aime52=nowhere.jsonl",), "no task named 'aime52'"),
        (("aime24=nowhere.jsonl",), "that task does not run; add --task aime24"),
    ],
)
def test_mistakes_in_data(kvbench: Kvbench, tiny: Path, tmp_path: Path, given: tuple[str, ...], sentence: str) -> None:
    options = [word for value in given for word in ("--data", value)]
    run = ("run", "--task", "aime25", *options, "--model", tiny, "--policy", "full", "--out", tmp_path)
    refused(kvbench(*run), sentence)


def test_the_same_in_python(tiny: Path, tmp_path: Path) -> None:
    import kvbench as package

    table = package.run(
        policy="full",
        task="aime25",
        data={"aime25": copy_of("aime25")},
        model=str(tiny),
        gen_len=4,
        limit=1,
        out=tmp_path,
    )
    assert table["data_revision"].str.startswith("sha256:").all()


def test_a_generated_task_takes_no_data(kvbench: Kvbench, tiny: Path, tmp_path: Path) -> None:
    run = ("run", "--task", "chain", "--data", "chain=x", "--model", tiny, "--policy", "full", "--out", tmp_path)
    refused(kvbench(*run), "Task 'chain' has no data set")


def test_the_papers_suite_is_planned_from_local_copies(kvbench: Kvbench, talker: Path, tmp_path: Path) -> None:
    copies = [word for task in ("aime24", "aime25", "hmmt_feb25", "hmmt_nov25")
              for word in ("--data", f"{task}={copy_of(task)}")]  # fmt: skip
    code, text, errors = kvbench(
        "run", "--suite", "paper-table1", "--model", talker, *copies, "--dry-run", "--out", tmp_path
    )
    assert (code, errors) == (0, "")
    for policy in ("streaming_llm_plus", "kvpop_mlp", "kvpop"):
        assert f"left out: Policy '{policy}'" in text
    lines = [words for line in text.splitlines() if len(words := line.split()) > 6 and words[1] in MATH]
    assert {(words[0], words[2], *words[4:7]) for words in lines if words[0] != "full"} == {
        (policy, "16384", cr, slots, "16384")
        for policy in ("streaming_llm", "tova")
        for cr, slots in (("0.75", "4096"), ("7/8", "2048"))
    }
    assert f"20 cells, at most {5 * 15 * 16 * 16384:,} new tokens" in text
