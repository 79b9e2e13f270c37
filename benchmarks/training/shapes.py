"""Models of a named shape with random weights, made where they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvbench.models
from kvbench.core.errors import KvbenchError
from kvbench.models.source import LoadedModel, geometry_of

_QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
_SMALL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "small": _SMALL,
}


def configuration(name: str, layers: int | None = None) -> Any:
    """A transformers configuration by name, `ref`, or the path of a config.json.

    Raises:
        KvbenchError: it is none of these.
    """
    if name in SHAPES:
        settings = dict(SHAPES[name])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    else:
        path = Path(str(kvbench.models.__file__)).parent / "ref" if name == "ref" else Path(name)
        if not path.exists():
            raise KvbenchError(
                f"There is no shape '{name}'; use {', '.join(SHAPES)}, ref, or the path of a config.json."
            )
        config = AutoConfig.from_pretrained(path)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:layers]
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, token, None)
    return config


def random_model(name: str, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> LoadedModel:
    """A model of this shape with random weights; those of `small` are the same on every device."""
    config = configuration(name, layers)
    torch.manual_seed(0)
    with torch.device("cpu" if name == "small" else device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]  # torch's own
    return LoadedModel(
        name=name,
        model=model.to(device).eval().requires_grad_(False),
        tokenizer=None,
        geometry=geometry_of(config),
        weights_hash="random",
        random=True,
        eos=frozenset(),
        max_positions=int(config.max_position_embeddings),
        device=device,
        dtype=dtype,
    )
