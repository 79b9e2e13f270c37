"""What the teacher would keep: scores from the future mass of the student's own attention, padding left out.

Everything here runs without gradient and in fp32, whatever autocast says.

Shapes: R rows, Hq query heads, H KV heads, S tokens, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.core.future_mass import future_mass, group_target


def normaliser(queries: Tensor, keys: Tensor, scale: float, keep: Tensor | None = None, block: int = 1024) -> Tensor:
    """Log-sum-exp of each query's logits [R, Hq, S], over all earlier tokens or over those it still sees.

    Args:
        queries: [R, Hq, S, D].
        keys: [R, H, S, D].
        scale: factor of the dot product.
        keep: [R, H, S, S], bool; None for the dense normaliser.
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
        earlier = position[:stop] <= position[start:stop, None]
        seen = earlier if keep is None else keep[:, :, None, start:stop, :stop]
        out[..., start:stop] = logits.masked_fill_(~seen, -torch.inf).logsumexp(-1)
    return out.reshape(rows, heads, size)


def future_target(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    window: int,
    lengths: Tensor,
    keep: Tensor | None = None,
    power: float = 1.0,
) -> Tensor:
    """Target score of each token [R, H, S]: log power mean of the attention from the real queries after its window.

    Args:
        queries: [R, Hq, S, D] after RoPE.
        keys: [R, H, S, D] after RoPE.
        scale: factor of the dot product.
        window: protected tokens.
        lengths: true length of each row [R]; queries at or after it are padding and count for nothing.
        keep: see `normaliser`.
        power: see `future_mass.future_mass`.
    """
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        shift = normaliser(queries, keys, scale, keep)
        size = queries.shape[2]
        position = torch.arange(size, device=queries.device)
        # A padded query with an infinite normaliser gives every token the mass zero.
        shift = shift.masked_fill((position >= lengths[:, None])[:, None], torch.inf)
        mass = future_mass(queries, keys, shift, scale, window, power=power)
        # future_mass averages over the queries of the padded row; the mean is over the real ones.
        padded = (size - window - position).clamp(min=1).float().log()
        real = (lengths[:, None] - window - position).clamp(min=1).float().log()
        return group_target(mass + (padded - real)[:, None] / power, keys.shape[1])
