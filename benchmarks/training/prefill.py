"""Prefill of a long prompt into few slots, against a dense prefill of the same prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training.clock import extra_memory, median_ms
from benchmarks.training.shapes import random_model
from benchmarks.training.steps import policy_for, recipe_for, untrained
from kvbench.core.policy import Policy
from kvbench.engine.run import Setting, contact, prefill
from kvbench.models.checkpoint import make_scorers

Row = dict[str, Any]


def measure(
    shape: str, length: int, slots: int, device: torch.device, repeats: int, emit: Callable[[Row], None]
) -> None:
    """Emits a row for the dense model, for KVpop, and for KVpop's stateless scorer."""
    loaded = random_model(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    recipe = recipe_for(shape, length, 1)
    ids = torch.randint(loaded.model.config.vocab_size, (1, length), device=device)
    before: float | None = None
    for name in ("full", "kvpop", "kvpop_mlp"):
        policy: Policy = untrained(name) if name == "full" else policy_for(recipe, name)
        scorers = None if name == "full" else make_scorers(policy_for(recipe, name), loaded.geometry)
        if scorers is not None:
            for parameter in scorers.parameters():
                nn.init.normal_(parameter, std=0.1)
            scorers.to(device).requires_grad_(False)
        budget = length if name == "full" else slots
        setting = Setting(loaded, policy, policy.checked_split(budget, loaded.geometry), scorers, length, length)

        call = partial(_read, setting, ids)
        taken = median_ms(call, device, repeats)
        before = before or taken
        emit(
            {
                "part": "prefill",
                "shape": shape,
                "policy": name,
                "length": length,
                "slots": budget,
                "ms": taken,
                "to dense": taken / before,
                "extra_gib": extra_memory(call, device),
            }
        )


def _read(setting: Setting, ids: Tensor) -> Tensor:
    """Logits of the last token, after a prefill into fresh slots."""
    seeds = torch.zeros(1, dtype=torch.int64, device=ids.device)
    with torch.inference_mode(), contact(setting.loaded):
        return prefill(setting, setting.layers(1, seeds), ids)
