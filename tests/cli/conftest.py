"""The command line in this process, and a tiny model with random weights to run it on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvbench.cli.main import main
from kvbench_tasks.vocabulary import VOCABULARY, build_tokenizer

Kvbench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvbench(capsys: pytest.CaptureFixture[str]) -> Kvbench:
    """Run a command; returns exit code, output and errors.

    Cells run in this process, where a test can reach them, unless a test says otherwise.
    """

    def call(*arguments: object) -> tuple[int, str, str]:
        given = [str(argument) for argument in arguments]
        if given[0] == "run" and "--processes" not in given:
            given += ["--processes", "1"]
        code = main(given)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder; its answers are noise, the same every time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=400,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer reads any text, byte by byte, and has a chat template; its answers are noise."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Bytes
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = tmp_path_factory.mktemp("models") / "talker"
    words = ["<pad>", "<start>", "<end>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = Bytes()
    talker = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<start>", eos_token="<end>"
    )
    talker.chat_template = (
        "{% for message in messages %}<start>{{ message['role'] }}: {{ message['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant: <think>\n{% endif %}"
    )
    talker.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
