"""What the teacher would keep: scores from the future mass of the student's own attention, padding left out.

Everything here runs without gradient and sums in fp32; products have the number type that attention itself computes in. The
kept set of a query is needed only through `Kept`, never as a mask over the whole sequence.

Shapes: R rows, Hq query heads, H KV heads, S tokens, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.future_mass import future_mass, group_target
from kvbench.core.ranking import Kept
from kvbench.kernels.logsumexp import future_logsumexp, normaliser


@dataclass(frozen=True)
class TargetKind:
    """Which variant of the target (docs/kvpop.md 3).

    Attributes:
        normaliser: `dense`: masses are relative to all earlier tokens; `sparse`: to what each query still sees.
        group: `max` or `mean` over the query heads of a group.
        count: mean over later queries; otherwise their sum.
        lookahead: queries after the window's end that count beyond the first; 0 for all of them.
        power: exponent of the mean, see `future_mass.future_mass`.
    """

    normaliser: str = "dense"
    group: str = "max"
    count: bool = True
    lookahead: int = 0
    power: float = 1.0


def future_target(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    window: int,
    lengths: Tensor,
    kind: TargetKind | None = None,
    kept: Kept | None = None,
    sparse: Tensor | None = None,
) -> Tensor:
    """Target score of each token [R, H, S]: log power mean of the attention from the real queries after its window.

    Args:
        queries: [R, Hq, S, D] after RoPE, as attention takes them.
        keys: [R, H, S, D] after RoPE, of the same number type.
        scale: factor of the dot product.
        window: protected tokens.
        lengths: true length of each row [R]; queries at or after it are padding and count for nothing.
        kind: the variant; the defaults when None.
        kept: what each query sees; for the sparse normaliser.
        sparse: the sparse normaliser [R, Hq, S] where attention over `kept` has already computed it.
    """
    kind = kind or TargetKind()
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        if kind.normaliser == "dense" or sparse is None:
            sparse = normaliser(queries, keys, scale, kept if kind.normaliser == "sparse" else None)
        sums = future_logsumexp(queries, keys, sparse, scale, window, lengths, kind.lookahead, kind.power)
        mass = future_mass(sums, window, lengths=lengths, lookahead=kind.lookahead, count=kind.count, power=kind.power)
        return group_target(mass, keys.shape[1], kind.group)
