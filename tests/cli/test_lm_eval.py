"""lm-eval's tasks through our command line, and our model through lm-eval's, against its own Hugging Face model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.rows import COMPLETIONS, read_results

TaskManager = pytest.importorskip("lm_eval.tasks", reason="lm-eval is an extra").TaskManager
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

Kvbench = Callable[..., tuple[int, str, str]]

GENERATE = """
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["eee", "ss"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three local tasks with twelve documents of 40 to 90 bytes."""
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(0)
    words = ["stone", "river", "glass", "north", "paper", "mill"]
    with (folder / "docs.jsonl").open("w") as file:
        for _ in range(12):
            text = " ".join(draw.choices(words, k=draw.randrange(8, 15)))
            choices = draw.sample(words, 3)
            file.write(json.dumps({"q": text, "a": words[0], "choices": choices, "label": draw.randrange(3)}) + "\n")
    for name, text in (("t_generate", GENERATE), ("t_choice", CHOICE), ("t_rolling", ROLLING)):
        source = (
            f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'docs.jsonl'}}}}}\ntest_split: test\n"
        )
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{text}metadata: {{version: 1.0}}\n")
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    # lm-eval's command line would index its own ten thousand tasks first.
    monkeypatch.setattr(TaskManager.__init__, "__defaults__", (None, None, False, None))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def _lm_eval(kvbench: Kvbench, folder: Path, out: Path, *model: str) -> dict[str, Any]:
    """lm-eval's results and samples, from its own command line."""
    line = ("lm-eval", "run", *model, "--tasks", "t_generate,t_choice,t_rolling", "--include_path", folder)
    code, text, errors = kvbench(*line, "--device", "cpu", "--log_samples", "--output_path", out, "--seed", "0")
    assert code == 0, text + errors
    (results,) = out.rglob("results_*.json")
    found: dict[str, Any] = json.loads(results.read_text("utf-8"))
    found["answers"] = {}
    for path in sorted(out.rglob("samples_*.jsonl")):
        samples = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        name = path.name.removeprefix("samples_").rpartition("_")[0]
        found["answers"][name] = [s["resps"] for s in sorted(samples, key=lambda s: s["doc_id"])]
    return found


@pytest.fixture(scope="module")
def theirs(folder: Path, talker: Path) -> dict[str, Any]:
    """The answers of lm-eval's own Hugging Face model."""
    from lm_eval import simple_evaluate

    told = simple_evaluate(
        model="hf",
        model_args=f"pretrained={talker},dtype=float32",
        tasks=["t_generate", "t_choice", "t_rolling"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    assert told is not None
    return dict(told)


def _values(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task}/{name}": value
        for task, metrics in results.items()
        for name, value in metrics.items()
        if "," in name and "stderr" not in name
    }


def _likelihoods(samples: list[dict[str, Any]]) -> list[list[tuple[float, bool]]]:
    return [[tuple(answers[0]) for answers in sample["resps"]] for sample in sorted(samples, key=lambda s: s["doc_id"])]


def test_both_command_lines_give_the_numbers_of_lm_evals_own_model(
    kvbench: Kvbench, folder: Path, talker: Path, tmp_path: Path, theirs: dict[str, Any]
) -> None:
    ours = _lm_eval(
        kvbench, folder, tmp_path / "lm", "--model", "kvbench", "--model_args", f"pretrained={talker},policy=full"
    )
    expected = _values(theirs["results"])
    assert _values(ours["results"]) == pytest.approx(expected, abs=1e-6)
    for mine, sample in zip(ours["answers"]["t_choice"], _likelihoods(theirs["samples"]["t_choice"]), strict=True):
        for (told,), (loglik, greedy) in zip(mine, sample, strict=True):
            assert float(told[0]) == pytest.approx(loglik, abs=1e-4)
            assert str(told[1]) == str(greedy)
    generated = [s["resps"] for s in sorted(theirs["samples"]["t_generate"], key=lambda s: s["doc_id"])]
    assert ours["answers"]["t_generate"] == generated
    assert {len(text) for ((text,),) in generated} == {0, 24}, "some are stopped, some are not"
    for task in ("t_generate", "t_choice"):
        out = tmp_path / task
        line = ("run", "--model", talker, "--policy", "full", "--task", f"lm-eval:{task}", "--limit", 50)
        code, text, _ = kvbench(*line, "--data", f"lm-eval:{task}={folder}", "--threads", 1, "--out", out)
        assert code == 0, text
        (row,) = read_results(out)
        assert row.metrics is not None
        mine = {f"{task}/{name}": value for name, value in json.loads(row.metrics).items()}
        assert mine == pytest.approx({name: v for name, v in expected.items() if name.startswith(task)}, abs=1e-6)
        assert (row.n, row.task, row.score) == (12, f"lm_eval:{task}", next(iter(mine.values())))
        assert (row.n_requested, row.without_eviction) == (50, 12 if task == "t_generate" else 36)
        assert str(row.data_revision).startswith("sha256:")
        if task == "t_generate":
            # What ended at a stop was not written to the end.
            assert row.output_length is not None
            assert row.truncated is not None
            assert 0 < row.truncated < 1
            assert 24 * row.truncated < row.output_length < 24


def test_a_policy_changes_log_likelihoods_and_what_cannot_is_counted(
    kvbench: Kvbench, folder: Path, talker: Path, tmp_path: Path, theirs: dict[str, Any]
) -> None:
    ours = _lm_eval(
        kvbench, folder, tmp_path, "--model", "kvbench", "--model_args", f"pretrained={talker},policy=random,budget=55"
    )
    lengths, changed = [], []
    dense = sorted(theirs["samples"]["t_choice"], key=lambda s: s["doc_id"])
    for mine, sample in zip(ours["answers"]["t_choice"], dense, strict=True):
        for (told,), (expected,), (context, continuation) in zip(
            mine, sample["resps"], sample["arguments"], strict=True
        ):
            # A byte a token; the last one is not read.
            lengths.append(len(context + continuation) - 1)
            changed.append(abs(float(told[0]) - expected[0]) > 1e-5)
    assert changed == [length > 55 for length in lengths]
    assert 0 < sum(changed) < len(changed)
    told = ours["config"]["kvbench"]
    assert (told["policy"], told["model"]) == ("random", talker.name)
    calls = {call["kind"]: call for call in told["calls"]}
    assert set(calls) == {"generate_until", "loglikelihood", "loglikelihood_rolling"}
    assert calls["loglikelihood"]["without_eviction"] == changed.count(False)
    assert {(call["slots"], call["peak"], call["violations"]) for call in calls.values()} == {(55, 55, 0)}


def test_rows_of_a_policy_count_what_could_not_be_evicted_from(
    kvbench: Kvbench, folder: Path, talker: Path, tmp_path: Path
) -> None:
    line = ("run", "--model", talker, "--policy", "tova", "--budget", 55, "--task", "lm_eval:t_choice", "--limit", 6)
    code, text, errors = kvbench(*line, "--data", f"lm_eval:t_choice={folder}", "--threads", 1, "--out", tmp_path)
    assert (code, errors) == (0, ""), text
    dense, policy = read_results(tmp_path)
    assert (dense.policy, dense.without_eviction, dense.n) == ("full", 18, 6)
    assert (policy.policy, policy.feeding, policy.slots, policy.violations) == ("tova", "chunks of 16", 55, 0)
    assert policy.without_eviction is not None
    assert 0 < policy.without_eviction < 18
    assert policy.evictions is not None
    assert policy.evictions > 0
    assert len((tmp_path / COMPLETIONS).read_text("utf-8").splitlines()) == 12


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--task", "lm_eval:t_choise"), "There is no task in "),
        (("--task", "lm_eval:t_choise"), "did you mean 't_choice'?"),
        (("--task", "lm_eval:"), "lm_eval:"),
        (("--task", "lm_eval:t_choice", "--policy-arg", "nothing=1"), "nothing"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    kvbench: Kvbench, folder: Path, talker: Path, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    line = ("run", "--model", talker, "--policy", "random", "--budget", 9, "--out", tmp_path, *arguments)
    if arguments[1] != "lm_eval:":
        line = (*line, "--data", f"{arguments[1]}={folder}")
    code, _, errors = kvbench(*line)
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert told in errors


def test_without_lm_eval_one_sentence_says_how_to_get_it(
    kvbench: Kvbench, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.harness.lm_eval_task.find_spec", lambda _name: None)
    code, _, errors = kvbench(
        "run", "--model", talker, "--policy", "full", "--task", "lm_eval:arc_easy", "--out", tmp_path
    )
    assert code == 2
    assert "pip install 'kvbench[lm-eval]'" in errors


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("policy=tovaa,cr=0.5", "did you mean 'tova'"),
        ("policy=tova", "There is no budget"),
        ("cr=2", "outside 0 <= cr"),
    ],
)
def test_wrong_model_arguments_are_ours_to_tell(talker: Path, arguments: str, told: str) -> None:
    from kvbench.harness.lm_eval_model import KvbenchLM

    with pytest.raises(KvbenchError, match=told):
        KvbenchLM.create_from_arg_string(f"pretrained={talker},{arguments}")


def test_its_help_is_lm_evals_own(kvbench: Kvbench) -> None:
    code, text, _ = kvbench("lm-eval", "run", "--help")
    assert code == 0
    assert "--include_path" in text
