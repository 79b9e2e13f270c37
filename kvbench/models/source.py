"""Where a model comes from, and what the rest of kvbench may know about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.core.policy import Geometry


def sliding_windows(config: object) -> list[int | None]:
    """The sliding window of each layer of a transformers configuration, None where the whole sequence is cached."""
    kinds = getattr(config, "layer_types", None)
    count = int(getattr(config, "num_hidden_layers"))  # noqa: B009 - the configuration classes share no typed base
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", None) is False:
        return [None] * count
    if kinds is None:
        # Mistral and its kin: one window for every layer.
        return [int(window)] * count
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


def geometry_of(config: object) -> Geometry:
    """Sizes of the layers that a policy manages, from a transformers configuration."""
    heads = int(getattr(config, "num_attention_heads"))  # noqa: B009 - the configuration classes share no typed base
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or int(getattr(config, "hidden_size")) // heads)  # noqa: B009
    return Geometry(sum(window is None for window in sliding_windows(config)), heads, kv_heads, head_dim)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        name: as written on the command line.
        model: a transformers causal LM in eval mode on `device`.
        tokenizer: its transformers tokenizer.
        geometry: of the layers whose cache a policy manages.
        weights_hash: SHA-256 over the weight files, or over the random seed and shape; empty where nobody knows it.
        random: the weights are random: cost only, never quality.
        eos: token ids that end a completion.
        max_positions: longest sequence that the model supports.
    """

    name: str
    model: Any
    tokenizer: Any
    geometry: Geometry
    weights_hash: str
    random: bool
    eos: frozenset[int]
    max_positions: int
    device: torch.device
    dtype: torch.dtype


class ModelSource(ABC):
    """One way to get a model; constructed without arguments for registered names."""

    @abstractmethod
    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Loads the weights.

        Raises:
            KvbenchError: the model is missing, damaged, or of an unsupported kind.
        """
