"""A kernel is held to the plain form where it first runs: what it says of some tokens, once a process and backend.

Kernels are compiled on the machine that runs them, from what its versions of torch and Triton make of them; at least one
released backend has returned log-sum-exps to another base. A wrong one would train quietly.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from kvbench.core.errors import KvbenchError

_SAMPLED = 32
_TOLERANCE = 0.02
"""In nats. Both sides sum in fp32 what the same numbers give; another base or a lost block is off by far more."""


def available(tensor: Tensor) -> bool:
    """Whether Triton kernels can take a tensor like this: it lies on a GPU, and Triton is there."""
    return tensor.is_cuda and find_spec("triton") is not None


_passed: set[tuple[str, str, torch.dtype]] = set()


@torch.no_grad()
def once(backend: str, found: Tensor, like: Tensor, expected: Callable[[Tensor], Tensor]) -> None:
    """Compares numbers of the first row with those of the plain form, the first time that a backend runs.

    Args:
        backend: name of the kernel.
        found: numbers of each head and token [R, Hq, S]: log-sum-exps, or integers.
        like: an input of the kernel, for its device and number type.
        expected: of indices [n], the plain form's for the first row [Hq, n].

    Raises:
        KvbenchError: they differ.
    """
    case = (backend, str(like.device), like.dtype)
    if case in _passed:
        return
    size = found.shape[-1]
    index = torch.linspace(0, size - 1, min(_SAMPLED, size), device=found.device).long()
    # Where the kernel runs, a matrix product may be told to round; the kernel does not.
    with torch.autocast(like.device.type, enabled=False):
        mine, plain = found[0][:, index].float(), expected(index).float()
    # Infinities of the same sign are equal; their difference is not a number.
    off = float(torch.where(mine == plain, 0.0, (mine - plain).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    if not off <= _TOLERANCE:
        raise KvbenchError(
            f"The kernel '{backend}' is wrong on {like.device} ({like.dtype}, torch {torch.__version__}): what it "
            f"says is off by {off:.3g}; use another version of torch, or --device cpu."
        )
    _passed.add(case)
