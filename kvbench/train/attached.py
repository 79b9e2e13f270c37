"""Scorers inside the model that they score for, and their losses inside its graph.

Each scorer is a submodule of its layer's attention, so that whatever shards, wraps or recomputes a layer treats the two
as one; for a checkpoint the parameters are split apart again by name. A layer's own loss rides on its output: the
backward pass hands it its gradient once, however often the forward pass was run (docs/decisions/020).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvbench.core.errors import KvbenchError
from kvbench.models.source import LoadedModel
from kvbench.train.distill import head_as, output_head

NAME = "kvbench_student"
"""The attention implementation of models that are trained, and of their teachers."""

SCORER = "kvbench_scorer"
"""Name of the submodule that an attention layer gets."""


class Attending(Protocol):
    """What a model call carries in its extra keyword `kvbench_step`."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [R, Hq, S, D], key and value [R, H, S, D] after RoPE -> output [R, Hq, S, D]."""
        ...


class _Probe:
    """Notes which modules attend, in their order."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.modules.append(module)
        return query


def attention_modules(model: Any, name: str) -> list[nn.Module]:
    """The attention of each layer, found by a forward pass over one token.

    Raises:
        KvbenchError: the model changes its logits after its output head, where nobody would see it.
    """
    probe = _Probe()
    device = next(output_head(model).parameters()).device
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        with torch.no_grad(), head_as(model, lambda _, hidden: hidden.new_full((1, 1, 2), 1e6)):
            ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
            logits = model(input_ids=ids, use_cache=False, kvbench_step=probe).logits
    finally:
        model.set_attn_implementation(before)
    if not bool((logits == 1e6).all()):
        raise KvbenchError(
            f"Model '{name}' ({type(model).__name__}) scales or caps its logits after the output head, "
            "which training does not support."
        )
    return probe.modules


def attach(loaded: LoadedModel, model: Any, scorers: nn.ModuleList | None) -> list[str]:
    """Makes each scorer a submodule of its layer's attention in `model`, a copy of the loaded one.

    Returns:
        The prefix of each scorer's parameter names, in the order of the layers; empty without scorers.
    """
    modules = attention_modules(model, loaded.name)
    if scorers is None:
        return []
    names = {module: name for name, module in model.named_modules()}
    for module, scorer in zip(modules, scorers, strict=True):
        module.add_module(SCORER, scorer)
    return [f"{names[module]}.{SCORER}." for module in modules]


def is_scorer(name: str) -> bool:
    """Whether a parameter of this name belongs to an attached scorer."""
    return f".{SCORER}." in name


def split_apart(weights: Mapping[str, Tensor], prefixes: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights by name as those of the language model and those of a ModuleList of the scorers."""
    scorers = {
        f"{index}.{name.removeprefix(prefix)}": value
        for index, prefix in enumerate(prefixes)
        for name, value in weights.items()
        if name.startswith(prefix)
    }
    return {name: value for name, value in weights.items() if not is_scorer(name)}, scorers


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, _loss: Tensor, factor: Tensor) -> Tensor:
        # Read in the backward pass: until then the step may still decide what the loss counts.
        ctx.factor = factor
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.factor, None


def with_loss(output: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
    """`output`, unchanged, whose backward pass also hands `loss` the gradient `factor`, both scalars in fp32.

    As the auxiliary losses of mixtures of experts are attached: counted once also where a layer is computed twice, and
    without a way past the layer for anything that shards it.
    """
    attached: Tensor = _Attached.apply(output, loss, factor)  # type: ignore[no-untyped-call]  # torch's own
    return attached


def scorer_of(module: nn.Module) -> nn.Module | None:
    """The scorer that is attached to an attention module."""
    return module._modules.get(SCORER)


def without_dropout(modules: Iterable[nn.Module]) -> None:
    """Sets every dropout to 0: a recomputed layer, and a teacher, have to see the same model."""
    for module in modules:
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def compute_twice(model: Any) -> None:
    """Makes a model's layers be computed again in the backward pass instead of stored."""
    # The older name stops working in transformers 6, the newer one came after 5.17.
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of the interface
    *,
    scaling: float,
    kvbench_step: Attending,
    **_: Any,
) -> tuple[Tensor, None]:
    return kvbench_step.attend(module, query, key, value, scaling).transpose(1, 2).contiguous(), None


# Not registered with the mask interface, so that transformers makes no mask of its own: rows are padded on the right,
# where causal attention never looks.
AttentionInterface.register(NAME, _attention)
