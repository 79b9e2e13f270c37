"""What a static priority keeps, with the cut-offs by a kernel where there is one.

Shapes: R rows, H KV heads, S tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.core import ranking
from kvbench.core.ranking import Kept
from kvbench.kernels import check


@torch.no_grad()
def keep(priority: Tensor, sinks: int, window: int, k: int) -> Kept:
    """`Kept.of` a priority [R, H, S].

    Raises:
        KvbenchError: the kernel does not work on this machine.
    """
    if not check.available(priority):
        return Kept.of(priority, sinks, window, k)
    from kvbench.kernels.cutoff import running_cutoff

    rank = ranking.ranks(priority)
    cutoff = running_cutoff(rank, sinks, window, k)

    def plain(index: Tensor) -> Tensor:
        return ranking.running_cutoff(rank[0], sinks, window, k)[:, index]

    check.once("running cut-off", cutoff, priority, plain)
    return Kept(rank, cutoff, sinks, window)
