"""What the teacher would keep: scores from the future mass of the student's own attention, padding left out.

Everything here runs without gradient and in fp32, whatever autocast says. It needs the kept set of a query only through
`Kept`, never as a mask over the whole sequence, so that a kernel may take its place.

Shapes: R rows, Hq query heads, H KV heads, S tokens, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.future_mass import future_mass, group_target
from kvbench.core.ranking import Kept


@dataclass(frozen=True)
class TargetKind:
    """Which variant of the target (docs/kvpop.md 3).

    Attributes:
        normaliser: `dense`: masses are relative to all earlier tokens; `sparse`: to what each query still sees.
        group: `max` or `mean` over the query heads of a group.
        count: mean over later queries; otherwise their sum.
        lookahead: queries after the window's end that count beyond the first; 0 for all of them.
        power: exponent of the mean over later queries, see `future_mass.future_mass`.
    """

    normaliser: str = "dense"
    group: str = "max"
    count: bool = True
    lookahead: int = 0
    power: float = 1.0


def normaliser(queries: Tensor, keys: Tensor, scale: float, kept: Kept | None = None, block: int = 1024) -> Tensor:
    """Log-sum-exp of each query's logits [R, Hq, S], over all earlier tokens or over those it still sees.

    Args:
        queries: [R, Hq, S, D].
        keys: [R, H, S, D].
        scale: factor of the dot product.
        kept: what each query sees; None for the dense normaliser.
        block: queries handled at once.
    """
    rows, heads, size, dim = queries.shape
    kv_heads = keys.shape[1]
    # Scaled here, not where there are S times as many numbers.
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size, dim).float() * scale
    out = grouped.new_empty(rows, kv_heads, heads // kv_heads, size)
    position = torch.arange(size, device=queries.device)
    for start in range(0, size, block):
        stop = min(start + block, size)
        # Later keys than the block's last query are seen by none of its queries.
        logits = grouped[..., start:stop, :] @ keys[:, :, None, :stop].float().transpose(-1, -2)
        if kept is None:
            seen = position[:stop] <= position[start:stop, None]
        else:
            seen = kept.mask(slice(start, stop))[:, :, None, :, :stop]
        out[..., start:stop] = logits.masked_fill_(~seen, -torch.inf).logsumexp(-1)
    return out.reshape(rows, heads, size)


def future_target(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    window: int,
    lengths: Tensor,
    kind: TargetKind | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Target score of each token [R, H, S]: log power mean of the attention from the real queries after its window.

    Args:
        queries: [R, Hq, S, D] after RoPE.
        keys: [R, H, S, D] after RoPE.
        scale: factor of the dot product.
        window: protected tokens.
        lengths: true length of each row [R]; queries at or after it are padding and count for nothing.
        kind: the variant; the defaults when None.
        kept: what each query sees; for the sparse normaliser.
    """
    kind = kind or TargetKind()
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        shift = normaliser(queries, keys, scale, kept if kind.normaliser == "sparse" else None)
        mass = future_mass(
            queries,
            keys,
            shift,
            scale,
            window,
            power=kind.power,
            lengths=lengths,
            lookahead=kind.lookahead,
            count=kind.count,
        )
        return group_target(mass, keys.shape[1], kind.group)
