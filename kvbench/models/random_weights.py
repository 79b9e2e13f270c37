"""Models of a given shape with random weights, made where they run: for what a step costs, never for what it says.

`shapes/` holds the published configurations of the named ones (Qwen3, Llama 3.1, SmolLM2-135M), without what no tensor depends
on.
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from kvbench.core.errors import KvbenchError, canonical
from kvbench.models.source import LoadedModel, geometry_of


def shape_names() -> list[str]:
    """The shapes that have a name."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def find_shape(name: str) -> Path | None:
    """The configuration file of a named shape, or of a path that ends with `.json`; None if it is neither.

    Raises:
        KvbenchError: the path leads nowhere.
    """
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise KvbenchError(f"There is no configuration file {name}.")
        return Path(name)
    known = {canonical(shape): shape for shape in shape_names()}
    found = known.get(canonical(name).lower())
    return None if found is None else _folder() / f"{found}.json"


def random_model(path: Path, device: torch.device, dtype: torch.dtype, positions: int = 0) -> LoadedModel:
    """A model of the shape of a transformers configuration file, its weights drawn on the device in their number type.

    Args:
        path: config.json.
        device: where it lives.
        dtype: of its weights.
        positions: that it has to take, whatever the file says: an untrained model has no longest sequence.

    Raises:
        KvbenchError: the file is no configuration of a causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        text = json.dumps(settings, sort_keys=True)
        config: Any = AutoConfig.for_model(**settings)
        config.max_position_embeddings = max(positions, int(config.max_position_embeddings))
        torch.manual_seed(0)
        with device:
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise KvbenchError(
            f"{path} is not the configuration of a causal language model that transformers knows. It says: {reason}"
        ) from error
    model.eval().requires_grad_(False)
    return LoadedModel(
        name=path.stem if path.stem != "config" else path.resolve().parent.name,
        model=model,
        tokenizer=None,
        geometry=geometry_of(config),
        weights_hash=hashlib.sha256(f"random 0 {text}".encode()).hexdigest(),
        random=True,
        eos=frozenset(),
        max_positions=int(config.max_position_embeddings),
        device=device,
        dtype=dtype,
    )


def _folder() -> Path:
    # A wheel is unpacked when it is installed, so the resource is a real folder.
    return Path(str(files("kvbench.models"))) / "shapes"
