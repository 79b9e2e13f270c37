"""How much of the fast memory of a multiprocessor a program may take; blocks that do not fit cannot be launched."""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def room(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on the device of a tensor; without bound where nothing is compiled."""
    if device.type != "cuda":
        return 2**31
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
