"""The delayed mLSTM scorer one token at a time in float64, without a stabiliser. Tests only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Sums:
    """The memory of one head as the equations have it: C [dphi, dv] and n [dphi], not scaled."""

    matrix: Tensor
    normaliser: Tensor


def read_after(memory: Sums, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> tuple[Tensor, Sums]:
    """Writes one token and reads: q and k [dphi], v [dv] without a final 1, gates i and f [] -> y [dv] and the memory."""
    keep, add = 1 / (1 + torch.exp(-f)), torch.exp(i)
    after = Sums(keep * memory.matrix + add * torch.outer(k, v), keep * memory.normaliser + add * k)
    scaled = q * q.numel() ** -0.5
    below = torch.clamp(scaled.dot(after.normaliser).abs(), min=1.0)
    return scaled @ after.matrix / below, after


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> tuple[Tensor, Sums]:
    """Reads of one head [S, dv] and its memory at the end: q and k [S, dphi], v [S, dv], gates [S], all float64."""
    memory = Sums(q.new_zeros(k.shape[1], v.shape[1]), q.new_zeros(k.shape[1]))
    out = []
    for token in range(len(q)):
        y, memory = read_after(memory, q[token], k[token], v[token], i[token], f[token])
        out.append(y)
    return torch.stack(out), memory


def scores(
    weights: Mapping[str, Tensor],
    keys: Tensor,
    values: Tensor,
    delay: int,
    cap: float,
    head_norm: bool,
    hedgehog: bool = True,
) -> Tensor:
    """`KvpopScorer.forward` [R, H, S] from its named parameters (float64) and keys and values [R, H, S, D]."""
    rows, heads, size, _ = keys.shape
    zero = weights["final"].sum() * 0
    out = []
    for row in range(rows):
        for head in range(heads):
            x = torch.cat([keys[row, head], values[row, head]], -1).double()
            written = x @ weights["value"][head] if "value" in weights else values[row, head].double()
            memory = Sums(*_nothing(weights["key"].shape[-1] * (1 + hedgehog), written.shape[-1]))
            found = []
            for now in range(size):
                scored = max(0, now - delay)
                given = (x[token] @ weights[name][head] for token, name in ((now, "key"), (scored, "query")))
                k, q = (_phi(z, hedgehog) for z in given)
                gates = x[now] @ weights["gates"][head] + weights["gate_bias"][head, 0]
                if cap:
                    gates = cap * torch.tanh(gates / cap)
                y, memory = read_after(memory, q, k, written[now], gates[0], gates[1])
                if now >= delay:
                    found.append(
                        _readout({name: tensor[head] for name, tensor in weights.items()}, y, x[scored], head_norm)
                    )
            out.append(torch.stack(found + [zero] * (size - len(found))))
    return torch.stack(out).view(rows, heads, size)


def _nothing(features: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(features, width, dtype=torch.float64), torch.zeros(features, dtype=torch.float64)


def _phi(z: Tensor, hedgehog: bool) -> Tensor:
    positive, negative = torch.exp(z), torch.exp(-z)
    if not hedgehog:
        return positive / positive.sum()
    return torch.cat([positive / positive.sum(), negative / negative.sum()])


def _readout(weights: Mapping[str, Tensor], y: Tensor, x: Tensor, head_norm: bool) -> Tensor:
    if head_norm:
        y = (y - y.mean()) / torch.sqrt(((y - y.mean()) ** 2).mean() + 1e-5)
    z = y @ weights["mix"] + weights["bias"][0]
    if "skip" in weights:
        z = z + x @ weights["skip"]
    return (z / (1 + torch.exp(-z))) @ weights["final"][:, 0]
