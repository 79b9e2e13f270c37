"""A Triton kernel: the sum of what a product of a few rows was shared into, the residual, and the RMSNorm that comes next.

Plain form: the model's `linear`, addition and `RMSNorm`; numbers are rounded where those round them. Shapes: M rows, N numbers,
S shares.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels import overlap
from kvbench.kernels.overlap import after_the_last


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _settled(  # type: ignore[no-untyped-def]
    x, shares, gain, out, normed, rows, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, SHARES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    n = tl.arange(0, PADDED)
    mask = n < SIZE
    scale = tl.load(gain + n, mask=mask, other=0.0).to(tl.float32)
    after_the_last(OVERLAPS)
    y = tl.load(x + row * SIZE + n, mask=mask, other=0.0).to(tl.float32)
    if SHARES > 0:
        update = tl.zeros([PADDED], tl.float32)
        for share in tl.static_range(SHARES):
            update += tl.load(shares + (share * rows + row) * SIZE + n, mask=mask, other=0.0)
        y = (y + update.to(out.dtype.element_ty).to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out + row * SIZE + n, y, mask=mask)
        y = y.to(tl.float32)
    y = y / tl.sqrt(tl.sum(y * y, 0) / SIZE + eps)
    tl.store(normed + row * SIZE + n, y.to(normed.dtype.element_ty).to(tl.float32) * scale, mask=mask)


def settled(x: Tensor, shares: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows with their update [M, N], and these normed [M, N].

    Args:
        x: rows before [M, N], contiguous.
        shares: of the update [S, M, N], fp32, contiguous; None for rows that stay as they are.
        gain: of the norm [N].
        eps: of the norm.
    """
    rows, size = x.shape
    out, normed = x if shares is None else x.new_empty(rows, size), x.new_empty(rows, size)
    _settled[(rows,)](
        x, x if shares is None else shares, gain, out, normed, rows, eps,
        SIZE=size, PADDED=triton.next_power_of_2(size), SHARES=0 if shares is None else len(shares), num_warps=8,
        **overlap.options(x),
    )  # fmt: skip
    return out, normed
