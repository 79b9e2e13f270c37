"""The decode step of a Qwen3 or Llama type model between its attentions: five launches a layer, seven for several rows.

Norm and q, k, v; heads' norms and rotation; output projection and residual; norm, gate, up and SwiGLU; down projection and
residual. For several rows residual and norm are launches of their own, for many the products are the library's. Weights are the
model's own tensors, not copies. Plain form: the model's `forward`; results differ from it in the last bits of its number type.
Imported only where Triton is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvbench.core.policy import StaticState
from kvbench.engine import fast
from kvbench.engine.layer import Layer, Step
from kvbench.kernels.rotary import rotated
from kvbench.kernels.settle import settled
from kvbench.kernels.skinny import few, product, shares
from kvbench.models.source import LoadedModel

_CLASSES = ("Qwen3ForCausalLM", "LlamaForCausalLM")


class Segments:
    """The step of one model; see `of`."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model: Any = loaded.model
        self._heads = (loaded.geometry.query_heads, loaded.geometry.kv_heads)

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self | None:
        """None for a model that is not of this type to the letter."""
        model: Any = loaded.model
        if type(model).__name__ not in _CLASSES or not type(model).__module__.startswith("transformers.models."):
            return None
        config = model.config
        linear = (module for module in model.modules() if isinstance(module, nn.Linear))
        plain = all(type(module) is nn.Linear and module.bias is None for module in linear)
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        one_type = all(p.dtype == loaded.dtype and p.is_contiguous() for p in model.parameters())
        kv = loaded.geometry.kv_heads * loaded.geometry.head_dim
        if not (plain and one_type and not hooked and config.hidden_act == "silu" and kv % 32 == 0):
            return None
        return cls(loaded)

    def decode(self, layers: Sequence[Layer], ids: Tensor, step: Step) -> Tensor:
        """Feeds one token a row, ids [R]; logits [R, V]."""
        inner = self._model.model
        stream = _Stream(inner.embed_tokens(ids))
        turns = inner.rotary_emb(stream.rows[:, None], step.positions[:, None])
        cos, sin = (turn[:, 0].contiguous() for turn in turns)
        for block, layer in zip(inner.layers, layers, strict=True):
            attention = block.self_attn
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            qkv = stream.product(block.input_layernorm, [part.weight for part in parts])
            norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
            query, key, value, old = rotated(
                qkv,
                self._heads,
                None if norms is None else (norms[0].weight, norms[1].weight),
                0.0 if norms is None else norms[0].variance_epsilon,
                cos,
                sin,
                layer.slots,
                step.positions,
                isinstance(layer.state, StaticState),
            )
            out = fast.decode(layer, query, key, value, attention.scaling, step.positions, old)
            stream.add(out.view(len(ids), -1), attention.o_proj.weight)
            pair = [block.mlp.gate_proj.weight, block.mlp.up_proj.weight]
            stream.add(stream.product(block.post_attention_layernorm, pair, gated=True), block.mlp.down_proj.weight)
        return stream.product(inner.norm, [self._model.lm_head.weight])


class _Stream:
    """The residual stream of a step; what few rows are to be added waits for the norm that comes next.

    Attributes:
        rows: [R, K].
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._few = few(len(rows), rows.dtype)
        self._update: Tensor | None = None

    def product(self, norm: Any, weights: Sequence[Tensor], *, gated: bool = False) -> Tensor:
        """Of the normed rows with each of the weights, side by side, or with a gate and what it is for."""
        gain, eps = norm.weight, norm.variance_epsilon
        if len(self.rows) == 1:
            return product(self.rows, weights, gain=gain, eps=eps, gated=gated)
        self.rows, normed = settled(self.rows, self._update, gain, eps)
        self._update = None
        return product(normed, weights, gated=gated) if self._few else _by_library(normed, weights, gated)

    def add(self, given: Tensor, weight: Tensor) -> None:
        """To the rows, the product of what is given with a weight."""
        if len(self.rows) == 1:
            self.rows = product(given, [weight], residual=self.rows)
        elif self._few:
            self._update = shares(given, weight)
        else:
            self.rows.addmm_(given, weight.T)


def _by_library(x: Tensor, weights: Sequence[Tensor], gated: bool) -> Tensor:
    """As `product`, of many rows."""
    if gated:
        gate, up = (functional.linear(x, weight) for weight in weights)
        return functional.silu(gate, inplace=True).mul_(up)
    sizes = [len(weight) for weight in weights]
    out = x.new_empty(len(x), sum(sizes))
    for part, weight in zip(torch.split(out, sizes, 1), weights, strict=True):
        torch.mm(x, weight.T, out=part)
    return out
