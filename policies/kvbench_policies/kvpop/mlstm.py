"""The matrix memory of an mLSTM: chunk by chunk for training and prefill, one token at a time for decoding.

In exact arithmetic (Beck et al. 2024, xLSTM, arXiv:2405.04517, equations 19-27, without output gate), with write
features k_t, values v_t, gates i_t (exponential) and f_t (sigmoid), and a read feature q_t of dimension d:

    C_t = sigmoid(f_t) C_{t-1} + exp(i_t) k_t v_t^T        n_t = sigmoid(f_t) n_{t-1} + exp(i_t) k_t
    y_t = C_t^T q_t d^-1/2 / max(n_t . q_t d^-1/2, 1)         (features are not negative: no absolute value)

What differs is only how it is kept finite. n is the last column of C, because v ends with a 1. The stabiliser m is
the *log sum* of the weights of all tokens so far (the empty memory at the start counts with weight 1), not the log of
their maximum: the stored cells are then a weighted mean of v k^T, moved by one interpolation a step, and never larger
than its largest term. y does not depend on m: numerator and denominator carry the same factor exp(-m).

Leading dimensions, written `...`, are any batch. Everything is fp32. |i| must stay below 80; f may be anything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad


class Memory(NamedTuple):
    """What is carried from token to token.

    Attributes:
        cells: [C n]^T scaled by exp(-m) [..., dv + 1, dphi].
        m: log of the scale [...].
    """

    cells: Tensor
    m: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], features: int, width: int, device: torch.device) -> Memory:
        """A memory of nothing: `shape` leads, `features` = dphi, `width` = dv + 1."""
        return cls(torch.zeros(*shape, width, features, device=device), torch.zeros(shape, device=device))


def step(memory: Memory, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """Writes one token into `memory`, in place, then reads [..., dv].

    Args:
        memory: before the token; after the call, after it.
        q: read feature, nowhere negative [..., dphi].
        k: write feature, nowhere negative [..., dphi].
        v: value that ends with a 1 [..., dv + 1].
        i: input gate before its exponential [...].
        f: forget gate before its sigmoid [...].
    """
    carried = logsigmoid(f) + memory.m
    share = (i - carried).sigmoid()
    m = torch.logaddexp(carried, i, out=memory.m)
    cells = memory.cells.lerp_(v.unsqueeze(-1) * k.unsqueeze(-2), share.unsqueeze(-1).unsqueeze(-1))
    # Product and sum, since a batched product of so small matrices is slower.
    return _quotient((cells * q.unsqueeze(-2)).sum(-1), m, q.shape[-1])


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, chunk: int = 0, memory: Memory | None = None
) -> tuple[Tensor, Memory]:
    """`step` for a whole sequence: parallel inside chunks and from chunk to chunk, differentiable.

    Weights between pairs exist inside chunks, S * chunk numbers, and between chunks, (S / chunk)^2.

    Gradients treat m as a constant, which is exact for everything read, also later from the returned memory.

    Args:
        q: read features, nowhere negative [..., S, dphi].
        k: write features, nowhere negative [..., S, dphi].
        v: values that end with a 1 [..., S, dv + 1].
        i: input gates before their exponential [..., S].
        f: forget gates before their sigmoid [..., S].
        chunk: tokens handled as one block; chosen by the sizes when 0.
        memory: before the first token; empty by default.

    Returns:
        What was read [..., S, dv], and the memory after the last token.
    """
    size, features = q.shape[-2:]
    memory = memory or Memory.empty(tuple(q.shape[:-2]), features, v.shape[-1], q.device)
    if size == 0:
        return v[..., :-1], memory
    # A chunk costs a memory: a wide one should stand for as many tokens, and chunks should not far outnumber their tokens.
    chunk = min(chunk or max(32, min(features, 128), (1 << size.bit_length() // 2) // 2), size)
    extra = -size % chunk
    # Tokens that fill up the last chunk have no weight (i = -inf) and forget nothing (log f = 0).
    lead = (*q.shape[:-2], -1, chunk)
    q, k, v = (pad(tensor, (0, 0, 0, extra)).reshape(*lead, tensor.shape[-1]) for tensor in (q, k, v))
    i = pad(i, (0, extra), value=-math.inf).reshape(lead)
    log_f = pad(logsigmoid(f), (0, extra)).reshape(lead).cumsum(-1)

    # Log weight of token j in the memory that row t of the same chunk reads [..., N, L, L].
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    logits = (log_f[..., :, None] - log_f[..., None, :] + i[..., None, :]).masked_fill(future, -math.inf)
    local = logits.detach().logsumexp(-1)
    at_end = (logits[..., -1, :] - local[..., -1:]).exp()
    written = v.mT @ (k * at_end[..., None])
    before, memory = _carry(memory, written, log_f[..., -1], local[..., -1])

    carried = log_f + before.m[..., None]
    m = torch.logaddexp(carried.detach(), local)
    mixed = (q @ k.mT * (logits - m[..., None]).exp()) @ v
    mixed = mixed + (carried - m).exp()[..., None] * (q @ before.cells.mT)
    return _quotient(mixed, m, features).flatten(-3, -2)[..., :size, :], memory


def _carry(memory: Memory, written: Tensor, log_f: Tensor, local: Tensor) -> tuple[Memory, Memory]:
    """The memories before each chunk (stacked along dimension -3 and -1) and the one after the last.

    Each is a weighted mean of the first memory and of what the chunks before it have written: one product, in place of a
    loop over chunks.

    Args:
        memory: before the first chunk.
        written: weighted mean of what each chunk adds [..., N, dv + 1, dphi].
        log_f: log of how much of the earlier memory is left after each chunk [..., N].
        local: log of the weight that belongs to `written` [..., N].
    """
    count, shape = written.shape[-3], written.shape[-2:]
    place = torch.arange(count + 1, device=written.device)
    # What source j, 0 the first memory and j the j-th chunk, has lost by each chunk after it, summed up to chunk n. Summed over
    # just these chunks: a difference of sums over all would lose small numbers among large ones.
    lost = log_f[..., :, None].masked_fill(place[:-1, None] < place, 0.0).cumsum(-2)
    lost = pad(lost, (0, 0, 1, 0)).masked_fill(place[:, None] < place, -math.inf)
    logits = lost + torch.cat((memory.m.detach()[..., None], local), -1)[..., None, :]
    m = logits.detach().logsumexp(-1)
    sources = torch.cat((memory.cells[..., None, :, :], written), -3).flatten(-2)
    cells = ((logits - m[..., None]).exp() @ sources).reshape(*m.shape, *shape)
    return Memory(cells[..., :-1, :, :], m[..., :-1]), Memory(cells[..., -1, :, :], m[..., -1])


def _quotient(mixed: Tensor, m: Tensor, features: int) -> Tensor:
    """Numerator over the bounded denominator [..., dv], from both in one tensor [..., dv + 1] and m [...].

    The factor d^-1/2 of q cancels in the quotient and is left to the bound:
    max(den d^-1/2, 1) = max(den, d^1/2) d^-1/2.
    """
    bound = (0.5 * math.log(features) - m).exp()
    return mixed[..., :-1] / torch.maximum(mixed[..., -1], bound).unsqueeze(-1)
