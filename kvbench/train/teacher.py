"""The dense model that an LM is distilled from, and what it said, kept on disk if asked to.

    DIR/ab/abcdef....safetensors      top logits of one row; named by what they depend on: weights, tokens, borders, K

A file is written when its row is first needed and read afterwards, by any training with the same rows.
"""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from kvbench.core.errors import KvbenchError
from kvbench.models.checkpoint import write_atomically
from kvbench.models.source import LoadedModel
from kvbench.train.attached import NAME
from kvbench.train.distill import Top, teacher_top
from kvbench.train.portion import Portion
from kvbench.train.student import Dense


class Teacher:
    """Top logits of rows, from a frozen copy of a model or from disk.

    Args:
        loaded: the dense model; left as it is.
        top: logits of each position that are compared.
        device: of the copy.
        autocast: the model computes in bf16 by autocast.
        halved: the copy's weights are bf16.
        cache: folder for what it says; None to keep nothing.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        top: int,
        device: torch.device,
        *,
        autocast: bool,
        halved: bool = False,
        cache: Path | None = None,
    ) -> None:
        self._loaded = loaded
        self._top = top
        self._device = device
        self._autocast = autocast
        self._halved = halved
        self._cache = cache
        self._model: Any = None

    @torch.no_grad()
    def __call__(self, portion: Portion) -> Top:
        """Top logits of a portion's rows [R, S, K], on the device."""
        if self._cache is None:
            return self._ask(portion)
        paths = [self._path(portion, row) for row in range(len(portion.batch.ids))]
        if not all(path.exists() for path in paths):
            self._keep(portion, paths, self._ask(portion))
        return self._read(portion, paths)

    def _ask(self, portion: Portion) -> Top:
        if self._model is None:
            # Made when it is first needed: where everything is on disk, the teacher takes no memory.
            self._model = copy.deepcopy(self._loaded.model).eval().requires_grad_(False)
            self._model.to(device=self._device, dtype=torch.bfloat16 if self._halved else self._loaded.dtype)
            self._model.set_attn_implementation(NAME)
        documents = None if portion.documents is None else portion.documents.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            return teacher_top(
                self._model,
                self._top,
                input_ids=portion.batch.ids.to(self._device, non_blocking=True),
                position_ids=None if documents is None else documents.positions,
                kvbench_step=Dense(documents),
            )

    def _path(self, portion: Portion, row: int) -> Path:
        assert self._cache is not None
        batch = portion.batch
        length = int(batch.lengths[row])
        digest = hashlib.sha256()
        settings = (self._loaded.weights_hash, self._top, self._autocast, self._halved)
        digest.update(repr(settings).encode())
        digest.update(batch.ids[row, :length].contiguous().numpy().tobytes())
        if batch.borders is not None:
            digest.update(batch.borders[batch.borders[:, 0] == row, 1:].contiguous().numpy().tobytes())
        name = digest.hexdigest()
        return self._cache / name[:2] / f"{name}.safetensors"

    def _keep(self, portion: Portion, paths: list[Path], top: Top) -> None:
        for row, path in enumerate(paths):
            length = int(portion.batch.lengths[row])
            stored = {"logits": top.logits[row, :length]}
            if top.tokens is not None:
                stored["tokens"] = top.tokens[row, :length].to(torch.int32)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save_tensors({name: value.cpu().contiguous() for name, value in stored.items()}))

    def _read(self, portion: Portion, paths: list[Path]) -> Top:
        rows, size = portion.batch.ids.shape
        logits: Tensor | None = None
        tokens: Tensor | None = None
        for row, path in enumerate(paths):
            try:
                stored = load_tensors(path.read_bytes())
                length, width = stored["logits"].shape
            except (OSError, SafetensorError, KeyError) as error:
                raise KvbenchError(f"{path} is damaged ({error}); delete it, and it is made again.") from error
            if logits is None:
                logits = stored["logits"].new_zeros(rows, size, width)
                tokens = torch.zeros(rows, size, width, dtype=torch.int64) if "tokens" in stored else None
            logits[row, :length] = stored["logits"]
            if tokens is not None:
                tokens[row, :length] = stored["tokens"].long()
        assert logits is not None
        return Top(logits.to(self._device), None if tokens is None else tokens.to(self._device))
