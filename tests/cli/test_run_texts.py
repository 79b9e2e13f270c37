"""Scored documents and needles through the command line, on a model that reads bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.core.result import Result
from kvbench.report.load import load
from kvbench.report.paired import paired
from kvbench.rows import COMPLETIONS, RESULTS, read_grades, read_results
from kvbench_tasks.longtext import documents

Kvbench = Callable[..., tuple[int, str, str]]

LENGTH = 600


def _run(kvbench: Kvbench, model: Path, out: Path, *more: object) -> dict[tuple[str, int | None], Result]:
    line = ("run", "--model", model, "--threads", 1, "--out", out, *more)
    code, text, errors = kvbench(*line)
    assert (code, errors) == (0, ""), text
    return {(row.policy, row.budget): row for row in read_results(out)}


@pytest.fixture(scope="module")
def likelihood(talker: Path) -> list[torch.Tensor]:
    """transformers' own log-probabilities of three documents."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(talker, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(talker)
    logprobs = []
    for document in documents()[:3]:
        ids = torch.tensor([tokenizer(document.text)["input_ids"][:LENGTH]])
        with torch.no_grad():
            found = model(ids).logits[0, :-1].log_softmax(-1)
        logprobs.append(found.gather(-1, ids[0, 1:, None])[:, 0])
    return logprobs


def test_documents_are_scored_and_compared(
    kvbench: Kvbench, talker: Path, tmp_path: Path, likelihood: list[torch.Tensor]
) -> None:
    what = ("--task", "longtext", "--gen-len", LENGTH, "--limit", 3, "--cr", "0.9", "--cr", "0")
    rows = _run(kvbench, talker, tmp_path, *what, *[x for p in ("random", "tova", "h2o") for x in ("--policy", p)])
    full = rows["full", None]
    expected = -sum(float(logprobs.mean()) for logprobs in likelihood) / 3
    assert full.nll == pytest.approx(expected, abs=1e-5)
    assert full.kl == pytest.approx(0, abs=1e-6)
    assert full.nll_excess == pytest.approx(0, abs=1e-6)
    assert (full.score, full.feeding, full.prefill, full.n) == (1.0, "exact", "exact", 3)
    for policy in ("random", "tova", "h2o"):
        whole, tight = rows[policy, LENGTH], rows[policy, LENGTH // 10]
        # A budget as long as the documents is the dense model.
        assert whole.nll == pytest.approx(expected, abs=1e-3)
        assert (whole.evictions, whole.feeding) == (0, "exact")
        assert tight.evictions == 3 * (LENGTH - 1 - LENGTH // 10)
        assert tight.kl is not None
        assert tight.kl > 1e-6
        assert tight.nll is not None
        assert tight.nll == pytest.approx(expected + (tight.nll_excess or 0), abs=1e-5)
        assert tight.feeding == ("exact" if policy == "random" else "chunks of 16")
        assert (tight.slots, tight.violations, tight.reference_length) == (LENGTH // 10, 0, LENGTH)
        assert tight.nll_lo is not None
        assert tight.nll_hi is not None
        assert tight.nll_lo < tight.nll < tight.nll_hi


def test_the_side_file_has_positions_and_the_table_says_what_it_shows(
    kvbench: Kvbench, talker: Path, tmp_path: Path, likelihood: list[torch.Tensor]
) -> None:
    _run(
        kvbench, talker, tmp_path, "--task", "longtext", "--gen-len", LENGTH, "--limit", 2, "--policy", "full"
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / COMPLETIONS).read_text("utf-8").splitlines()]
    assert [line["problem"] for line in lines] == ["longtext@1/Hamlet", "longtext@1/Macbeth"]
    told = json.loads(lines[0]["text"])
    assert told["bucket"] == 256
    # Buckets are positions 0-255, 256-511, 512-599; position 0 is predicted by nothing.
    pieces = torch.split(likelihood[0], [255, 256, 88])
    assert told["nll"] == pytest.approx([-float(piece.mean()) for piece in pieces], abs=1e-4)
    assert told["dense_nll"] == pytest.approx(told["nll"], abs=1e-4)
    assert told["top1"] == [1.0, 1.0, 1.0]
    assert [grade.correct for grade in read_grades(tmp_path)] == [1.0, 1.0]
    code, text, _ = kvbench("table", tmp_path)
    assert code == 0
    assert "Documents, told token by token" in text
    assert "What is left of the dense model" not in text
    assert "exact answers" not in text
    assert "! " not in text


def test_a_dense_likelihood_that_is_none_raises_an_alarm(kvbench: Kvbench, talker: Path, tmp_path: Path) -> None:
    what = ("--task", "longtext", "--gen-len", 40, "--limit", 2, "--policy", "random", "--budget", 64)
    rows = _run(kvbench, talker, tmp_path, *what)
    # Whether it is slower than dense is the machine's to say.
    (calm,) = [row for row in paired(load([tmp_path])) if row.policy == "random"]
    assert not any("not as likely" in alarm for alarm in calm.alarms)
    wrong = replace(rows["random", 64], nll_excess=0.002)
    with (tmp_path / RESULTS).open("a") as file:
        file.write(wrong.to_json() + "\n")
    (alarmed,) = [row for row in paired(load([tmp_path])) if row.policy == "random"]
    assert any("not as likely as to the dense model" in alarm for alarm in alarmed.alarms)


def test_documents_that_are_too_short_are_refused(kvbench: Kvbench, talker: Path, tmp_path: Path) -> None:
    line = ("run", "--model", talker, "--task", "longtext", "--policy", "full", "--out", tmp_path / "out")
    code, _, errors = kvbench(*line, "--gen-len", 30000)
    assert code == 2
    assert "Task 'longtext' has no documents of 30000 tokens" in errors
    assert "longtext@1/Hamlet has 19" in errors
    assert kvbench(*line, "--gen-len", 1)[0] == 2


@pytest.mark.parametrize("task", ["needle_single", "needle_multikey", "needle_multivalue", "variable_tracking"])
def test_needles_run_at_any_length(kvbench: Kvbench, talker: Path, tmp_path: Path, task: str) -> None:
    what = ("--task", task, "--gen-len", 1500, "--limit", 2, "--policy", "streaming_llm", "--cr", "0.75")
    rows = _run(kvbench, talker, tmp_path, *what)
    row = next(row for (policy, _), row in rows.items() if policy == "streaming_llm")
    answer = {"needle_multivalue": 96, "variable_tracking": 48}.get(task, 32)
    assert (row.gen_length, row.reference_length, row.budget) == (1500, 1500 + answer, (1500 + answer) // 4)
    assert row.prompt_length is not None
    assert 1400 < row.prompt_length <= 1500
    assert row.output_length == answer
    assert row.score == 0.0
