"""Models that the engine can run, and one sentence for those that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kvbench.core.errors import KvbenchError
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Request
from kvbench.engine.run import contact
from kvbench.models.source import LoadedModel, geometry_of, sliding_windows
from kvbench_policies.full import Full
from kvbench_policies.streaming_llm import StreamingLlm
from tests.engine.tiny import greedy, text, wrap

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _load(name: str, without: tuple[str, ...] = (), **more: Any) -> LoadedModel:
    settings = {key: value for key, value in SIZES.items() if key not in without}
    config = getattr(transformers, f"{name}Config")(**{**settings, **more})
    class_name = name.removesuffix("Text") + "ForCausalLM"
    return wrap(getattr(transformers, class_name)(config), name)


def _run(loaded: LoadedModel) -> list[int]:
    prompt = tuple(text(14).tolist())
    completion = Engine(loaded, Full(), None).generate([Request(prompt, 12)]).completions[0]
    assert completion.near_ties == 0
    assert list(completion.tokens) == greedy(loaded, prompt, 12)
    return list(completion.tokens)


def test_gpt2_whose_configuration_has_other_names() -> None:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    _run(wrap(transformers.GPT2LMHeadModel(config)))


def test_olmo3_slides_in_some_layers() -> None:
    _run(_load("Olmo3", sliding_window=8, layer_types=["sliding_attention", "full_attention"]))


def test_a_window_that_is_switched_off_is_none() -> None:
    loaded = _load("Qwen2", sliding_window=8, use_sliding_window=False)
    assert sliding_windows(loaded.model.config) == [None, None]
    _run(loaded)


def test_a_model_past_the_attention_interface_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    loaded = LoadedModel(
        "old", transformers.BloomForCausalLM(config), None, geometry_of(config), "", True, frozenset(), 64,
        torch.device("cpu"), torch.float32,
    )  # fmt: skip
    sentence = r"Model 'old' \(BloomForCausalLM\) does not use transformers' attention interface"
    with pytest.raises(KvbenchError, match=sentence), contact(loaded):
        pass
    with pytest.raises(KvbenchError, match=sentence):
        Engine(loaded, StreamingLlm(), 12).generate([Request((1, 2), 3)])


@pytest.mark.parametrize("name", ["Mistral", "Phi3", "Starcoder2"])
def test_a_window_in_every_layer_is_refused(name: str) -> None:
    with pytest.raises(KvbenchError, match="sliding window in every layer"):
        _run(_load(name, sliding_window=8))


@pytest.mark.parametrize("name", ["Mistral", "Phi3", "Starcoder2"])
def test_the_same_models_without_a_window_run(name: str) -> None:
    _run(_load(name, sliding_window=None))


def test_one_window_for_every_layer() -> None:
    config = transformers.MistralConfig(**SIZES, sliding_window=8)
    assert not hasattr(config, "layer_types")
    assert sliding_windows(config) == [8, 8]
    assert geometry_of(config).layers == 0
    config.use_sliding_window = False
    assert sliding_windows(config) == [None, None]
    config.use_sliding_window = True
    assert sliding_windows(config) == [8, 8]


def test_a_list_of_kinds_that_all_slide_is_refused() -> None:
    loaded = _load("Ministral", head_dim=8, sliding_window=8, layer_types=["sliding_attention"] * 2)
    with pytest.raises(KvbenchError, match="sliding window in every layer"):
        _run(loaded)


def test_soft_capped_logits_are_refused() -> None:
    loaded = _load("Gemma2", head_dim=8, attn_logit_softcapping=2.0, sliding_window=8)
    with pytest.raises(KvbenchError, match="soft-capped logits"):
        _run(loaded)
    assert loaded.model.config._attn_implementation != "kvbench"


def test_learned_sinks_are_refused() -> None:
    loaded = _load("GptOss", head_dim=8, sliding_window=8, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(KvbenchError, match="learned sinks"):
        _run(loaded)


def test_chunked_layers_are_refused() -> None:
    loaded = _load("Llama4Text", head_dim=8, num_local_experts=2, attention_chunk_size=8)
    with pytest.raises(KvbenchError, match="chunked_attention"):
        _run(loaded)


def test_keys_and_values_of_other_sizes_are_refused() -> None:
    loaded = _load(
        "DeepseekV3", q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6, n_routed_experts=2,
        num_experts_per_tok=1, n_group=1, topk_group=1, first_k_dense_replace=2,
    )  # fmt: skip
    with pytest.raises(KvbenchError, match="kvbench needs the same shape in every layer"):
        _run(loaded)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotation_by_the_longest_row_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(KvbenchError, match="rotary embeddings"):
        _run(_load("Llama", rope_parameters={"rope_theta": 10_000.0, "original_max_position_embeddings": 32, **rope}))


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_fixed_rotation_runs(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    _run(_load("Llama", rope_parameters=rope))
