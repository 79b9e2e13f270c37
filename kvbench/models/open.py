"""From a name on the command line to a loaded model."""

from __future__ import annotations

from pathlib import Path

import torch

from kvbench.core.errors import KvbenchError, canonical, unknown_name
from kvbench.entries import load_target
from kvbench.models.huggingface import HuggingFace
from kvbench.models.source import LoadedModel, ModelSource
from kvbench.plugins import Registry


def open_model(name: str, registry: Registry, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Loads a registered model, a local folder, or a hub name (`owner/name`), in this order.

    Raises:
        KvbenchError: nothing goes by this name, or it could not be loaded.
    """
    entry = registry.models.get(canonical(name))
    if entry is not None:
        source = load_target(entry.target)
        assert isinstance(source, type)
        made = source()
        if not isinstance(made, ModelSource):
            raise KvbenchError(f"Model '{name}' ({entry.target}) is not a kvbench.models.source.ModelSource.")
        return made.load(device, dtype)
    if Path(name).is_dir() or "/" in name:
        return HuggingFace(name).load(device, dtype)
    raise unknown_name("model", name, registry.models)
