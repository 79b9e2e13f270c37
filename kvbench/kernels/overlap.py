"""Programmatic dependent launch: a kernel of a chain starts while the one before it ends, and loads what nobody writes.

A decode step is some hundred short kernels in a row. Between two of them the device empties and fills again, which costs a
microsecond or more each. From compute capability 9.0 on, a kernel may be set up as soon as all programs of the one before it
have started; `after_the_last` then waits until that one has finished and what it wrote is there. So before that nothing may be
read but weights, and nothing written, and every kernel that is launched with these options has to call it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def after_the_last(OVERLAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits for the kernel before; the one behind may be set up meanwhile."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def options(tensor: Tensor) -> dict[str, bool]:
    """Options of the launch of a kernel with the constant `OVERLAPS`, on the device of a tensor."""
    return {"OVERLAPS": True, "launch_pdl": True} if tensor.is_cuda and _can(tensor.device) else {"OVERLAPS": False}


@cache
def _can(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
