from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvbench.cli.main import main
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


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp", "streaming_llm_plus"])
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
            "Policy 'tova' has nothing to train; trainable: kvpop, kvpop_mlp, streaming_llm_plus.",
        ),
        (
            ["--policy", "kvpop", "--recipe", "rev"],
            "There is no training recipe named 'rev'; did you mean 'ref'",
        ),
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
