"""Any decoder-only model that transformers loads: a local folder, or a name on the hub."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from kvbench.core.errors import KvbenchError
from kvbench.models.source import LoadedModel, ModelSource, geometry_of

_BLOCK = 1 << 20


class HuggingFace(ModelSource):
    """A model by folder or hub name.

    Args:
        path: folder with config.json, safetensors weights and a tokenizer, or `owner/name` on the hub.
        name: how results call it; the folder's name or the hub name when empty.
    """

    def __init__(self, path: str, name: str = "") -> None:
        self._path = path
        self._name = name or (Path(path).name if Path(path).is_dir() else path)

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        folder = Path(self._path)
        try:
            config = AutoConfig.from_pretrained(self._path)
            if config.is_encoder_decoder:
                raise KvbenchError(f"Model '{self._name}' is an encoder-decoder; kvbench needs a decoder-only model.")
            model: Any = AutoModelForCausalLM.from_pretrained(self._path, dtype=dtype, use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(self._path)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            where = "the folder" if folder.is_dir() else "neither a folder here nor a model that the hub gave us"
            reason = " ".join(str(error).split())[:200]
            raise KvbenchError(
                f"Model '{self._path}' ({where}) could not be loaded; it needs config.json, safetensors weights "
                f"and a tokenizer. transformers says: {reason}"
            ) from error
        model.to(device).eval().requires_grad_(False)
        ends = model.generation_config.eos_token_id
        eos = frozenset(ends if isinstance(ends, list) else [ends]) if ends is not None else frozenset()
        if tokenizer.eos_token_id is not None:
            eos |= {tokenizer.eos_token_id}
        return LoadedModel(
            name=self._name,
            model=model,
            tokenizer=tokenizer,
            geometry=geometry_of(config),
            weights_hash=hash_files(folder) if folder.is_dir() else hash_parameters(model),
            random=False,
            eos=eos,
            max_positions=int(config.max_position_embeddings),
            device=device,
            dtype=dtype,
        )


def hash_files(folder: Path) -> str:
    """SHA-256 over the names and contents of a folder's safetensors files."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def hash_parameters(model: torch.nn.Module) -> str:
    """SHA-256 over a model's parameters in order of their names, as they were loaded."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
