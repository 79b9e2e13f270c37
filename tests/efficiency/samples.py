"""A tiny shape, and rows that nobody measured."""

from __future__ import annotations

from dataclasses import replace

from kvbench.core.result import Environment
from kvbench.efficiency.record import EfficiencyCell, EfficiencyResult, Figures

TINY = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

CELL = EfficiencyCell(
    source="kvbench",
    model="tiny",
    weights_hash="w",
    weights="random",
    policy="full",
    reference_length=32,
    gen_length=32,
    batch_asked=1,
    prompt_length=8,
    steps=3,
    dtype="float32",
    device="cpu",
    device_name="abacus",
)

FIGURES = Figures(
    path="plain",
    batch=1,
    capacity=33,
    entries=32.0,
    ms_per_step=2.0,
    ms_lo=1.9,
    ms_hi=2.2,
    n=3,
    tokens_per_s=500.0,
    bandwidth=1e9,
    moved_weights=100,
    moved_kv=200,
    moved_metadata=3,
    moved_scorer=4,
    moved_state=5,
    floor_ms=1.0,
    floor_ratio=2.0,
    memory="counted",
    peak_memory=1000,
    weights_bytes=100,
    kv_bytes=200,
    scorer_bytes=0,
    metadata_bytes=0,
    state_bytes=0,
    curve=((32, 2.0),),
    head_lengths=((1, 2), (3, 4)),
    notes=("a note",),
)

ENVIRONMENT = Environment(
    python="3",
    torch="2",
    transformers="5",
    kvbench="0",
    dirty=None,
    platform="here",
    device_name="abacus",
    threads=1,
)


def row(length: int, ms: float, policy: str = "full", **changes: object) -> EfficiencyResult:
    cell = replace(CELL, policy=policy, gen_length=length, **changes)  # type: ignore[arg-type]  # any field of a cell
    figures = replace(FIGURES, ms_per_step=ms, curve=((length, ms),), peak_memory=length * 100)
    return EfficiencyResult(
        cell=cell, status="ok", figures=figures, command="kvbench", commit=None, environment=ENVIRONMENT
    )
