"""The training of the reference model, on a tiny one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.core.errors import KvbenchError
from kvbench.models.huggingface import HuggingFace
from kvbench.train import reference_lm
from kvbench.train.reference_batches import IGNORED, ReferenceBatches
from kvbench.train.reference_lm import ReferenceTraining, build_model, rate_share
from kvbench.train.reference_recipe import ReferenceRecipe
from kvbench.train.resume import CONFIGURATION, LOG, STATE
from kvbench_tasks.vocabulary import VOCABULARY

RECIPE = """
tasks = ["recurrence", "stack"]
vocabulary = "kvbench_tasks.vocabulary:VOCABULARY"
tokenizer = "kvbench_tasks.vocabulary:build_tokenizer"
seed = 3
steps = 6

[model]
vocab_size = 64
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
max_position_embeddings = 512
rope_theta = 10000.0

[optimizer]
learning_rate = 1e-2
betas = [0.9, 0.98]
weight_decay = 0.05
clip = 1.0
warmup_steps = 2
constant_share = 0.5
final_share = 0.1

[data]
tokens_per_step = 400

[[data.stages]]
until_step = 3
levels = { 128 = 1.0 }

[[data.stages]]
levels = { 128 = 0.5, 256 = 0.5 }
"""

CPU = torch.device("cpu")


class Killed(BaseException):
    """What a signal does to a training."""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture
def recipe(recipe_file: Path) -> ReferenceRecipe:
    return ReferenceRecipe.from_file(recipe_file)


def _train(recipe: ReferenceRecipe, out: Path, start: Path | None = None) -> ReferenceTraining:
    training = ReferenceTraining(recipe, out, CPU, start=start)
    training.run(workers=0, log_every=1, save_every=2)
    return training


def _weights(training: ReferenceTraining) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in training.model.named_parameters()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _log(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").splitlines()]
    return [{name: line[name] for name in ("step", "loss", "grad_norm", "rate")} for line in lines]


@pytest.mark.parametrize("last", [1, 3, 4, 5])
def test_a_killed_training_goes_on_as_if_nothing_had_been(recipe: ReferenceRecipe, tmp_path: Path, last: int) -> None:
    whole = _train(recipe, tmp_path / "whole")
    assert not _same(_weights(whole), dict(build_model(recipe).named_parameters())), "nothing was learned"

    def kill(step: int) -> None:
        if step == last:
            raise Killed

    killed = ReferenceTraining(recipe, tmp_path / "killed", CPU)
    with pytest.raises(Killed):
        killed.run(workers=0, log_every=1, save_every=2, after_step=kill)
    with (tmp_path / "killed" / LOG).open("a", encoding="utf-8") as log:
        log.write('{"step": 6, "lo')
    resumed = ReferenceTraining(recipe, tmp_path / "killed", CPU)
    assert resumed.progress.step == last // 2 * 2
    resumed.run(workers=0, log_every=1, save_every=2)
    assert _same(_weights(resumed), _weights(whole))
    assert resumed.tokens == whole.tokens
    assert _log(tmp_path / "killed") == _log(tmp_path / "whole")
    assert [line["step"] for line in _log(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]


def test_the_state_is_tensors_and_json(recipe: ReferenceRecipe, tmp_path: Path) -> None:
    _train(recipe, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {STATE, CONFIGURATION, LOG}
    assert {name.split(".")[0] for name in load_file(tmp_path / "out" / STATE)} == {"model", "optimizer"}


def test_another_recipe_in_the_same_folder_is_refused(recipe: ReferenceRecipe, tmp_path: Path) -> None:
    _train(recipe, tmp_path / "out")
    with pytest.raises(KvbenchError, match=r"another configuration \(recipe.seed: 3 there, 4 here\)"):
        ReferenceTraining(recipe.changed(seed=4), tmp_path / "out", CPU)
    assert ReferenceTraining(recipe.changed(seed=4), tmp_path / "out", CPU, resume=False).progress.step == 0


def test_a_damaged_state_is_refused(recipe: ReferenceRecipe, tmp_path: Path) -> None:
    _train(recipe, tmp_path / "out")
    (tmp_path / "out" / STATE).write_bytes(b"not tensors")
    with pytest.raises(KvbenchError, match=r"resume.safetensors is damaged .*start afresh with --no-resume"):
        ReferenceTraining(recipe, tmp_path / "out", CPU)


def test_a_second_part_starts_from_the_stored_model(recipe: ReferenceRecipe, tmp_path: Path) -> None:
    first = _train(recipe, tmp_path / "first")
    first.store()
    stored = {name: value.bfloat16() for name, value in _weights(first).items()}
    second = ReferenceTraining(recipe.changed(seed=9), tmp_path / "second", CPU, start=tmp_path / "first")
    assert _same({name: value.bfloat16() for name, value in _weights(second).items()}, stored)
    second.run(workers=0)
    second.store()
    summary = json.loads((tmp_path / "second" / "training_summary.json").read_text(encoding="utf-8"))
    assert (summary["recipe"]["seed"], summary["started_from"]["recipe"]["seed"]) == (9, 3)
    assert summary["started_from"]["started_from"] is None
    # The same recipe from other weights is another training.
    with pytest.raises(KvbenchError, match="another configuration"):
        ReferenceTraining(recipe.changed(seed=9), tmp_path / "second", CPU)


def test_a_start_that_is_none_is_refused(recipe: ReferenceRecipe, tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="cannot start from"):
        ReferenceTraining(recipe, tmp_path / "out", CPU, start=tmp_path / "nowhere")
    other = tmp_path / "other"
    other.mkdir()
    save_file({"strange": torch.zeros(2)}, other / "model.safetensors")
    with pytest.raises(KvbenchError, match="'strange' is in one of the two models only"):
        ReferenceTraining(recipe, tmp_path / "out", CPU, start=other)
    assert not (tmp_path / "out").exists()


def test_from_the_command_line_to_a_model_that_loads(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--recipe", str(recipe_file), "--out", str(out), "--device", "cpu", "--workers", "0"]
    reference_lm.main([*arguments, "--eval-problems", "2", "--log-every", "2"])
    assert {path.name for path in out.iterdir()} == {
        "README.md", "config.json", "eval.json", "generation_config.json", "log.jsonl", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "training_summary.json",
    }  # fmt: skip
    assert "# The kvbench reference model" in (out / "README.md").read_text(encoding="utf-8")
    scores = json.loads((out / "eval.json").read_text(encoding="utf-8"))["scores"]
    assert [(row["task"], row["level"], row["dtype"]) for row in scores] == [
        (task, level, dtype)
        for task in ("recurrence", "stack")
        for level in (128, 256)
        for dtype in ("float32", "bfloat16")
    ]
    assert {row["n"] for row in scores} == {2}
    loaded = HuggingFace(str(out)).load(CPU, torch.float32)
    assert loaded.eos == frozenset({VOCABULARY.index("<eos>")})
    assert loaded.tokenizer("a 1")["input_ids"] == [VOCABULARY.index("a"), VOCABULARY.index("1")]
    with torch.no_grad():
        assert loaded.model(input_ids=torch.tensor([[1, 4, 5]])).logits.shape == (1, 3, 64)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        reference_lm.main(arguments)
    assert stop.value.code == 2
    assert "is not empty and holds no training" in capsys.readouterr().err


def test_a_model_over_the_limit_is_refused(recipe: ReferenceRecipe) -> None:
    with pytest.raises(KvbenchError, match="at most 3000000 are allowed"):
        build_model(recipe.changed(model={**recipe.model, "hidden_size": 1024, "intermediate_size": 4096}))  # type: ignore[arg-type]  # a field that recipes do not change


def test_the_learning_rate_warms_up_stays_and_falls(recipe: ReferenceRecipe) -> None:
    optimizer = recipe.optimizer
    assert rate_share(0, 0.0, optimizer) == 0.5
    assert rate_share(1, 0.0, optimizer) == rate_share(50, 0.5, optimizer) == 1.0
    assert rate_share(50, 0.75, optimizer) == pytest.approx(0.55)
    assert rate_share(50, 1.0, optimizer) == pytest.approx(0.1)


def test_batches_are_training_problems_and_only_completions_are_learned(recipe: ReferenceRecipe) -> None:
    batches = ReferenceBatches(recipe)
    evaluated = {p.prompt for task in batches.tasks for level in (128, 256) for p in task.problems(level, 50, 0)}
    for step in range(len(batches)):
        batch, again = batches[step], batches[step]
        assert torch.equal(batch.ids, again.ids)
        assert batch.level == 128 or step >= 3
        for row, size, labels in zip(batch.ids.tolist(), batch.prompt_lens.tolist(), batch.labels(), strict=True):
            text = [VOCABULARY[token] for token in row]
            assert " ".join(text[:size]) not in evaluated
            assert text[size - 1] == "do"
            learned = [VOCABULARY[label] for label in labels.tolist() if label != IGNORED]
            assert learned == text[size : text.index("<eos>") + 1]
