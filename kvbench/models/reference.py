"""The embedded reference model: a small Qwen3-shaped LM that solves the reference tasks.

Trained from scratch by `recipes/kvbench_recipes/train/reference-lm.toml`; stored in bf16 and evaluated as stored. Its
compute type is fp32 wherever it runs: the arithmetic is small, and answers then agree between devices.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import as_file, files

import torch

from kvbench.core.errors import KvbenchError
from kvbench.models.huggingface import HuggingFace
from kvbench.models.source import LoadedModel, ModelSource


class Reference(ModelSource):
    """Model `ref`."""

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        folder = files("kvbench.models") / "ref"
        with as_file(folder) as path:
            if not (path / "model.safetensors").is_file():
                raise KvbenchError("The embedded model 'ref' is missing from this installation; install kvbench again.")
            return replace(HuggingFace(str(path), "ref").load(device, dtype), name="ref")
