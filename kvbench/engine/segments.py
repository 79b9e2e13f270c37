"""The decode step of a Qwen3 or Llama type model between its attentions, in five or six launches a layer.

Norm and q, k, v; heads' norms and rotation; output projection and residual; norm, gate, up and SwiGLU; down projection and
residual. For one row all products are kernels of our own. For several the library's are faster where at most a residual is to
be added; q, k and v are laid side by side in memory, so that one product makes all three. Weights are the model's own
tensors, not copies. Plain form: the model's `forward`; results differ from it in the last bits of its number type.
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
from kvbench.kernels.skinny import few, product
from kvbench.models.source import LoadedModel

_CLASSES = ("Qwen3ForCausalLM", "LlamaForCausalLM")


class Segments:
    """The step of one model; see `of`."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model: Any = loaded.model
        self._heads = (loaded.geometry.query_heads, loaded.geometry.kv_heads)
        # For one row too, which does without: a graph that was captured would go on reading what was there before.
        for block in self._model.model.layers:
            side_by_side(_qkv(block.self_attn))

    @classmethod
    def of(cls, loaded: LoadedModel, rows: int) -> Self | None:
        """None for a model that is not of this type to the letter, and for more rows than the products are made for."""
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
        return cls(loaded) if few(rows, loaded.dtype) else None

    def decode(self, layers: Sequence[Layer], ids: Tensor, step: Step) -> Tensor:
        """Feeds one token a row, ids [R]; logits [R, V]."""
        inner = self._model.model
        x = inner.embed_tokens(ids)
        cos, sin = (turn[:, 0].contiguous() for turn in inner.rotary_emb(x[:, None], step.positions[:, None]))
        for block, layer in zip(inner.layers, layers, strict=True):
            attention = block.self_attn
            qkv = _normed(x, block.input_layernorm, _qkv(attention))
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
            x = _added(x, out.view(len(x), -1), attention.o_proj.weight)
            norm, pair = block.post_attention_layernorm, [block.mlp.gate_proj.weight, block.mlp.up_proj.weight]
            gated = product(x, pair, gain=norm.weight, eps=norm.variance_epsilon, gated=True)
            x = _added(x, gated, block.mlp.down_proj.weight)
        return _normed(x, inner.norm, [self._model.lm_head])


def _qkv(attention: Any) -> list[nn.Linear]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _normed(x: Tensor, norm: Any, projections: Sequence[nn.Linear]) -> Tensor:
    """The projections of the normed rows [R, K], side by side."""
    if len(x) == 1:
        weights = [projection.weight for projection in projections]
        return product(x, weights, gain=norm.weight, eps=norm.variance_epsilon)
    wide = side_by_side(projections)
    return functional.linear(functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon), wide)


def _added(x: Tensor, given: Tensor, weight: Tensor) -> Tensor:
    """The rows and their update; `x` is not used again."""
    return product(given, [weight], residual=x) if len(x) == 1 else x.addmm_(given, weight.T)


def side_by_side(projections: Sequence[nn.Linear]) -> Tensor:
    """One matrix [sum of N_i, K] that the weights [N_i, K] are parts of; they are moved there the first time."""
    weights = [projection.weight for projection in projections]
    first, sizes = weights[0], [len(weight) for weight in weights]
    ends = [first.data_ptr() + first.stride(0) * first.element_size() * sum(sizes[:i]) for i in range(len(sizes))]
    shared = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if not (shared and [weight.data_ptr() for weight in weights] == ends):
        # A weight that was made in inference mode takes no other kind of data, and the other way round.
        with torch.inference_mode(first.is_inference()), torch.no_grad():
            wide = torch.cat([weight.data for weight in weights])
            for weight, part in zip(weights, torch.split(wide, sizes), strict=True):
                weight.data = part
    return first.data.as_strided((sum(sizes), first.shape[1]), (first.stride(0), 1))
