"""Weights and optimizer state as whole tensors by name, whatever has wrapped or sharded the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule


def weights(model: nn.Module, names: Sequence[str], processes: int) -> dict[str, Tensor]:
    """These parameters, whole; of several processes, on the CPU of the first one. To be called in all of them."""
    _reshard(model)
    found: dict[str, Any] = get_model_state_dict(model, options=_options(processes))
    return {name: found[name] for name in names if name in found}


def state(
    model: nn.Module, names: Sequence[str], optimizer: torch.optim.Optimizer, processes: int
) -> dict[str, Tensor]:
    """Weights and optimizer state; otherwise like `weights`."""
    _reshard(model)
    whole: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_options(processes))
    tensors = {f"weights.{name}": value for name, value in weights(model, names, processes).items()}
    # Empty in all processes but the first.
    for name, values in whole.get("state", {}).items():
        tensors |= {f"optimizer.{key}.{name}": value for key, value in values.items()}
    return tensors


def restore(
    model: nn.Module, names: Sequence[str], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Puts back what `state` gave. To be called in all processes, each with the whole tensors.

    Raises:
        KeyError: a parameter is missing.
    """
    stored: dict[str, Any] = {name: tensors[f"weights.{name}"] for name in names}
    # Names of tied parameters appear once.
    set_model_state_dict(model, stored, options=StateDictOptions(full_state_dict=True, strict=False))
    state: dict[str, Any] = {}
    for full_name, value in tensors.items():
        kind, _, rest = full_name.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            state.setdefault(name, {})[key] = value
    options = StateDictOptions(full_state_dict=True)
    groups = get_optimizer_state_dict(model, optimizer, options=options)["param_groups"]
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups}, options=options)


def _reshard(model: nn.Module) -> None:
    """A forward pass without a backward pass leaves some of a sharded model's parameters whole; the optimizer's are not."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _options(processes: int) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=processes > 1)
