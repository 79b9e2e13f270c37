"""The decode step of a Qwen3 or Llama type model between its attentions, in five launches a layer.

Norm and q, k, v; heads' norms and rotation; output projection and residual; norm, gate, up and SwiGLU; down projection and
residual. Weights are the model's own tensors, not copies. Plain form: the model's `forward`; results differ from it in the last
bits of its number type, since a norm is not rounded before its product. Imported only where Triton is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn

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
            qkv = _normed(x, block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj])
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
            x = product(out.view(len(x), -1), [attention.o_proj.weight], residual=x)
            gated = _normed(x, block.post_attention_layernorm, [block.mlp.gate_proj, block.mlp.up_proj], gated=True)
            x = product(gated, [block.mlp.down_proj.weight], residual=x)
        return _normed(x, inner.norm, [self._model.lm_head])


def _normed(x: Tensor, norm: Any, projections: Sequence[nn.Linear], gated: bool = False) -> Tensor:
    weights = [projection.weight for projection in projections]
    return product(x, weights, gain=norm.weight, eps=norm.variance_epsilon, gated=gated)
