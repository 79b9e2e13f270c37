"""Tiny random models, policies that tests can steer, and a loop that feeds tokens by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvbench.core.hashing import uniform
from kvbench.core.policy import (
    Geometry,
    LearnedPolicy,
    ObservedState,
    PointwiseState,
    Policy,
    Split,
    State,
    StateRequest,
    StaticState,
    Tokens,
)
from kvbench.core.slots import Slots
from kvbench.engine.layer import Step
from kvbench.engine.run import Setting, contact, decode, prefill
from kvbench.models.source import LoadedModel, geometry_of

VOCABULARY = 64
SLIDING = 8

_KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3_sliding": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"use_sliding_window": True, "sliding_window": SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": SLIDING,
            "layer_types": ["full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 5,
            "tie_word_embeddings": False,
        },
    ),
}


def config(kind: str, heads: int = 4, kv_heads: int = 2, positions: int = 2048, **more: Any) -> tuple[Any, Any]:
    """The class of a tiny causal LM and its configuration: 2 layers, head size 8."""
    configuration, model, extra = _KINDS[kind]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "max_position_embeddings": positions,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return model, configuration(**{**sizes, **extra, **more})


def wrap(
    model: nn.Module, name: str = "tiny", eos: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> LoadedModel:
    """A transformers causal LM as the engine gets it."""
    settings: Any = model.config
    return LoadedModel(
        name=name,
        model=model.to(dtype).eval().requires_grad_(False),
        tokenizer=None,
        geometry=geometry_of(settings),
        weights_hash="",
        random=True,
        eos=frozenset(eos),
        max_positions=int(settings.max_position_embeddings),
        device=torch.device("cpu"),
        dtype=dtype,
    )


@cache
def load(
    kind: str = "qwen3",
    heads: int = 4,
    kv_heads: int = 2,
    positions: int = 2048,
    eos: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> LoadedModel:
    """A tiny model with the same random weights in every test."""
    model, configuration = config(kind, heads, kv_heads, positions, **more)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        made = model(configuration)
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):  # all ones would give every normalised key the same length
                parameter.data += 0.3 * torch.randn_like(parameter)
        return wrap(made, kind, eos, dtype)


def text(*shape: int) -> Tensor:
    """Random token ids."""
    return torch.randint(VOCABULARY, shape)


@torch.no_grad()
def dense(loaded: LoadedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """transformers' own logits [R, S, V]; `mask` [R, 1 or Hq, S, S] (bool) replaces the causal one."""
    full = None if mask is None else torch.zeros(mask.shape, dtype=loaded.dtype).masked_fill(~mask, -torch.inf)
    logits: Tensor = loaded.model(input_ids=ids, attention_mask=full, use_cache=False).logits
    return logits


@torch.no_grad()
def greedy(loaded: LoadedModel, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy continuation, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(dense(loaded, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def random_scorers(policy: Policy, geometry: Geometry) -> nn.ModuleList | None:
    """One scorer a layer with no parameter at zero, for learned policies that have scorers."""
    if not isinstance(policy, LearnedPolicy):
        return None
    generator = torch.Generator().manual_seed(5)
    scorers = [policy.scorer(geometry) for _ in range(geometry.layers)]
    modules = nn.ModuleList([scorer for scorer in scorers if scorer is not None])
    for parameter in modules.parameters():
        parameter.requires_grad_(False).add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return modules if len(modules) == geometry.layers else None


def kept(positions: Tensor) -> list[list[frozenset[int]]]:
    """The positions held by each row and head of [R, H, B]; every one of them once."""
    held = []
    for row in positions.tolist():
        held.append([frozenset(p for p in head if p >= 0) for head in row])
        assert [len(one) for one in held[-1]] == [sum(p >= 0 for p in head) for head in row]
    return held


@dataclass(frozen=True)
class Trace:
    """What teacher-forced feeding saw: logits [R, N, V] of the last prompt token and each further one; for each of
    them the sets by layer, row, head; and the layers as they were left."""

    logits: Tensor
    kept: list[list[list[list[frozenset[int]]]]]
    layers: list[Any]


def feed(
    loaded: LoadedModel,
    policy: Policy,
    budget: int,
    ids: Tensor,
    prompt: int = 1,
    scorers: nn.ModuleList | None = None,
    split: Split | None = None,
) -> Trace:
    """Reads ids[:, :prompt] as a prompt and feeds the rest of ids [R, S] one by one."""
    rows = len(ids)
    split = split or policy.checked_split(budget, loaded.geometry)
    setting = Setting(loaded, policy, split, scorers, ids.shape[1], ids.shape[1])
    layers = setting.layers(rows, torch.arange(rows))
    with torch.inference_mode(), contact(loaded):
        logits = [prefill(setting, layers, ids[:, :prompt])]
        sets = [[kept(layer.slots.positions) for layer in layers]]
        for place in range(prompt, ids.shape[1]):
            step = Step(torch.full((rows,), place), place + 1, place + 1)
            logits.append(decode(loaded, layers, ids[:, place], step))
            sets.append([kept(layer.slots.positions) for layer in layers])
    return Trace(torch.stack(logits, 1), sets, list(layers))


@dataclass(frozen=True)
class Table(Policy):
    """Priorities drawn from a few levels by KV head and position, the same in every layer.

    With `odd`, some are NaN, infinite, or minus infinity.
    """

    name: ClassVar[str] = "table"
    sinks: int = 2
    window: int = 3
    levels: int = 3
    odd: bool = False

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=self.sinks, window=self.window)

    def state(self, request: StateRequest) -> State:
        return TableState(self, request.geometry.kv_heads)

    def priority(self, heads: int, positions: Tensor) -> Tensor:
        """[R, H, T] of positions [R, T]."""
        draw = uniform(torch.arange(heads)[None, :, None], positions[:, None])
        level = (draw * self.levels).floor()
        if self.odd:
            odd = uniform(torch.tensor(99), torch.arange(heads)[None, :, None], positions[:, None])
            for share, value in ((0.5, math.nan), (0.4, -math.inf), (0.3, math.inf)):
                level = torch.where(odd < share, value, level)
        return level


class TableState(PointwiseState):
    def __init__(self, policy: Table, heads: int) -> None:
        self._policy, self._heads = policy, heads

    def priority(self, tokens: Tokens) -> Tensor:
        return self._policy.priority(self._heads, tokens.positions)


@dataclass(frozen=True)
class Delayed(Policy):
    """A token's priority follows from its own key and from everything read until it leaves the window."""

    name: ClassVar[str] = "delayed"
    sinks: int = 1
    window: int = 4

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=self.sinks, window=self.window)

    def state(self, request: StateRequest) -> State:
        return DelayedState(request)


class DelayedState(StaticState):
    """Whole numbers, so that the two ways of computing them agree exactly."""

    def __init__(self, request: StateRequest) -> None:
        self._window = request.split.window
        self._total = torch.zeros(request.rows, request.geometry.kv_heads)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._total,)

    def step(self, new: Tokens, leaving: Tokens) -> Tensor:
        self._total += _count(new.values)[..., 0]
        return (_count(leaving.keys)[..., 0] + self._total) % 7

    def prefill(self, tokens: Tokens) -> Tensor:
        total = _count(tokens.values).cumsum(-1)
        self._total.copy_(total[..., -1])
        later = torch.cat([total[..., self._window :], total[..., -1:].expand(-1, -1, self._window)], -1)
        return (_count(tokens.keys) + later[..., : total.shape[-1]]) % 7


def _count(vectors: Tensor) -> Tensor:
    return (vectors > 0).sum(-1).float()


@dataclass(frozen=True)
class Flat(Policy):
    """An observed policy that ranks every token the same, sinks and window included."""

    name: ClassVar[str] = "flat"
    static: ClassVar[bool] = False
    sinks: int = 2
    window: int = 4

    def split(self, budget: int, geometry: Geometry) -> Split:
        return Split(slots=budget, sinks=self.sinks, window=self.window)

    def state(self, request: StateRequest) -> State:
        return FlatState()


class FlatState(ObservedState):
    def observe(self, weights: Tensor, slots: Slots) -> None:
        slots.set_priority(torch.zeros(*slots.positions.shape[:2], weights.shape[-1]))
