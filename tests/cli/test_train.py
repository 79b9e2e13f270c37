from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvbench.cli.main import main
from kvbench.rows import read_results
from kvbench_tasks.vocabulary import VOCABULARY, build_tokenizer

RECIPE = """
steps = 3
tokens = 400
boundary_future = 16
eval_every = 2
eval_rows = 1
save_every = 2
crs = ["0.5"]
tasks = ["codebook"]
[levels]
128 = 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "short.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp", "kvpop_linear", "dms", "streaming_llm_plus"])
def test_train(model: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str) -> None:
    out = tmp_path / "out"
    line = [
        "train",
        "--policy",
        policy,
        "--model",
        str(model),
        "--recipe",
        str(recipe),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    assert main([*line, "--policy-arg", "window=8"]) == 0
    shown = capsys.readouterr().out
    name = policy.replace("-", "_")
    assert "step 3/3 kl 0." in shown
    assert "step 2 held back, cr 1/2: kl " in shown
    assert f"  kvbench run --policy {name} --model {model} --cr 0.5 --checkpoint {out}\n" in shown
    manifest = json.loads((out / "kvbench_policy.json").read_text())
    assert (manifest["policy_name"], manifest["parameters"]["window"], manifest["parameters"]["sinks"]) == (
        name,
        8,
        4,
    )
    # Again: the finished training is found, nothing is done twice.
    assert main([*line, "--policy-arg", "window=8"]) == 0
    assert "step" not in capsys.readouterr().out
    assert main([*line, "--policy-arg", "window=6"]) == 2
    assert "another configuration (parameters.window: 8 there, 6 here)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policy", "kvpob"], "There is no policy named 'kvpob'; did you mean 'kvpop'"),
        (
            ["--policy", "tova"],
            "Policy 'tova' has nothing to train; trainable: dms, kvpop, kvpop_linear, kvpop_mlp, streaming_llm_plus.",
        ),
        (
            ["--policy", "kvpop", "--recipe", "rev"],
            "There is no training recipe named 'rev'; did you mean 'ref'",
        ),
        (["--policy", "dms_topk"], "Policy 'dms_topk' runs on a checkpoint of 'dms'; train that."),
        (["--policy", "kvpop", "--set", "margn=1"], "There is no recipe setting named 'margn'; did you mean 'margin'"),
        (["--policy", "kvpop", "--set", "margin"], "The setting 'margin' is not KEY=VALUE."),
        (["--policy", "kvpop", "--cr", "2"], "The compression ratio 2 is outside 0 <= cr < 1"),
        (["--policy", "kvpop", "--steps", "0"], "The recipe setting 'steps' is 0; it has to be at least 1."),
        (["--policy", "kvpop", "--policy-arg", "window"], "The policy argument 'window' is not KEY=VALUE."),
        (
            ["--policy", "kvpop", "--policy-arg", "window=x"],
            "The policy argument window=x is not of type int.",
        ),
        (
            ["--policy", "kvpop", "--policy-arg", "widnow=3"],
            "Policy 'kvpop' has no parameter 'widnow'; it has ",
        ),
        (
            ["--policy", "kvpop", "--policy-arg", "window=0"],
            "Policy 'kvpop' needs window of at least 1, not 0.",
        ),
        (["--policy", "kvpop", "--device", "abacus"], "There is no device 'abacus'; use auto, cpu or cuda."),
        (["--policy", "kvpop", "--model", "rev"], "There is no model named 'rev'"),
        (
            ["--policy", "kvpop", "--cr", "0.99"],
            "Rows of level 128 are too short to train ratio 0.99: they leave 2 slots",
        ),
    ],
)
def test_wrong_input_is_one_sentence(
    model: Path,
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    defaults = [
        "--model",
        str(model),
        "--recipe",
        str(recipe),
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "out"),
    ]
    for index in range(0, len(arguments), 2):
        if arguments[index] in defaults:
            place = defaults.index(arguments[index])
            del defaults[place : place + 2]
    assert main(["train", *arguments, *defaults]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("error: ") == 1
    assert not (tmp_path / "out").exists()


def test_what_was_trained_runs_and_so_does_its_lm(
    model: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps of training with single settings from the command line, then the benchmark on what they made."""
    out = tmp_path / "out"
    line = ["train", "--policy", "dms", "--model", str(model), "--recipe", str(recipe), "--out", str(out)]
    more = ["--set", "ramp=0.3", "--set", "group=mean", "--teacher-cache", str(tmp_path / "cache"), "--device", "cpu"]
    assert main([*line, *more, "--precompute"]) == 0
    assert "The teacher's logits for 3 steps lie in" in capsys.readouterr().out
    assert not (out / "log.jsonl").exists()
    assert main([*line, *more]) == 0
    manifest = json.loads((out / "kvbench_policy.json").read_text())
    assert (manifest["recipe"]["ramp"], manifest["recipe"]["group"]) == (0.3, "mean")
    assert len(manifest["parameters"]["shifts"]) == 1
    small = ["--task", "codebook", "--gen-len", "128", "--limit", "2", "--threads", "1", "--processes", "1"]
    run = ["run", "--model", str(model), "--device", "cpu", "--budget", "60", *small, "--out", str(tmp_path / "runs")]
    policies = ["--policy", "dms", "--policy", "dms_topk", "--checkpoint", str(out)]
    assert main([*run, *policies]) == 0
    assert main([*run, "--policy", "random", "--adapted-lm", str(out)]) == 0
    rows = {row.policy: row for row in read_results(tmp_path / "runs")}
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["dms"].checkpoint == rows["dms_topk"].checkpoint == rows["random"].adapted_lm is not None
    assert rows["dms_topk"].violations == 0
    assert rows["dms_topk"].entries_mean is None
    dms = rows["dms"]
    assert dms.head_entries is not None
    assert dms.entries_mean is not None
    assert dms.entries_peak is not None
    assert 0 < dms.entries_mean <= dms.entries_peak
    assert dms.entries_peak <= (dms.slots or 0)


def test_curves_of_trainings_are_drawn(
    model: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    line = ["train", "--policy", "kvpop_mlp", "--model", str(model), "--recipe", str(recipe), "--device", "cpu"]
    assert main([*line, "--out", str(tmp_path / "one")]) == 0
    picture = tmp_path / "curves.svg"
    assert main(["plot-training", str(tmp_path / "one"), "--out", str(picture)]) == 0
    drawn = picture.read_text()
    assert all(label in drawn for label in ("token accuracy", "recall", "retained mass", "one"))
    log = (tmp_path / "one" / "log.jsonl").rename(tmp_path / "log_alone.jsonl")
    assert main(["plot-training", str(log), "--out", str(picture)]) == 0
    assert "log_alone" in picture.read_text()
    assert main(["plot-training", str(tmp_path / "two"), "--out", str(picture)]) == 2
    assert "two holds no training: it has no log.jsonl" in capsys.readouterr().err.replace("\n", " ")
