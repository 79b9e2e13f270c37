"""Single passes: the target against a causal attention forward, and the cut-off against the forward pass of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from benchmarks.training.clock import extra_memory, median_ms
from benchmarks.training.shapes import random_model
from benchmarks.training.steps import fastest_attention, policy_for, recipe_for
from kvbench.core.ranking import Kept
from kvbench.kernels import logsumexp
from kvbench.kernels.attention import attention_over
from kvbench.kernels.kept import keep
from kvbench.kernels.visible import Visible
from kvbench.models.source import LoadedModel
from kvbench.train.attached import NAME
from kvbench.train.student import Dense
from kvbench.train.target import TargetKind, future_target

Row = dict[str, Any]


def measure(shape: str, lengths: list[int], device: torch.device, repeats: int, emit: Callable[[Row], None]) -> None:
    """Emits a row for each length."""
    loaded = random_model(shape, device, torch.float32, layers=1)
    loaded.model.set_attn_implementation(NAME)
    sizes = loaded.geometry
    for length in lengths:
        with (
            torch.no_grad(),
            fastest_attention(device, sizes.query_heads, sizes.kv_heads, length, sizes.head_dim) as backend,
        ):
            emit(
                {"part": "pass", "shape": shape, "length": length, "sdpa": backend, **_passes(loaded, length, repeats)}
            )


def _passes(loaded: LoadedModel, length: int, repeats: int) -> Row:
    """Milliseconds by pass, their ratios, and the memory of the target."""
    sizes, device = loaded.geometry, loaded.device
    half = device.type == "cuda"
    policy = policy_for(recipe_for(loaded.name, length, 1))
    split = policy.checked_split(length // 4, sizes)
    query, key, value = (
        torch.randn(1, heads, length, sizes.head_dim, device=device, dtype=torch.bfloat16 if half else torch.float32)
        for heads in (sizes.query_heads, sizes.kv_heads, sizes.kv_heads)
    )
    scale = sizes.head_dim**-0.5
    whole = torch.tensor([length], device=device)
    priority = torch.randn(1, sizes.kv_heads, length, device=device)
    kept = keep(priority, split.sinks, split.window, split.long)
    dense = logsumexp.normaliser(query, key, scale)
    ids = torch.randint(loaded.model.config.vocab_size, (1, length), device=device)

    def causal() -> Any:
        attend = functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True, scale=scale, enable_gqa=True)

    def target() -> Any:
        return future_target(query, key, scale, split.window, whole, TargetKind("sparse"), None, dense)

    def target_and_normaliser() -> Any:
        return future_target(query, key, scale, split.window, whole)

    def cut_off() -> Any:
        return keep(priority, split.sinks, split.window, split.long)

    def ranked() -> Any:
        return attention_over(query, key, value, kept, scale)

    def layer() -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1, kvbench_step=Dense())

    calls = {
        "causal SDPA forward": causal,
        "target": target,
        "target with its dense normaliser": target_and_normaliser,
        "cut-off": cut_off,
        "attention over what is kept": ranked,
        "layer forward": layer,
    }
    taken = {name: median_ms(call, device, repeats) for name, call in calls.items()}
    memory = extra_memory(target_and_normaliser, device)
    return {
        **{f"{name} ms": value for name, value in taken.items()},
        "target / SDPA": taken["target"] / taken["causal SDPA forward"],
        "target with normaliser / SDPA": taken["target with its dense normaliser"] / taken["causal SDPA forward"],
        "cut-off / layer": taken["cut-off"] / taken["layer forward"],
        "what is kept / SDPA": taken["attention over what is kept"] / taken["causal SDPA forward"],
        "its blocks / causal": _blocks_to_causal(kept),
        "target's extra GiB": memory,
        "extra KiB a token": memory * 2**20 / length,
    }


def _blocks_to_causal(kept: Kept) -> float:
    """How many blocks of pairs attention over what is kept visits, for one that causal attention visits."""
    _, heads, length = kept.rank.shape
    visited = [
        sum(int(blocks.sum()) for blocks in visible.blocks())
        for visible in (Visible.of(kept), Visible.causal(1, length, kept.rank.device))
    ]
    return visited[0] / (heads * visited[1])
