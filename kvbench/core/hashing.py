"""Counter-based random numbers: a pure function of integers, equal on every device and in every batch."""

from __future__ import annotations

import torch
from torch import Tensor

_INCREMENT = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer: splitmix64's constants
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) right shift of an int64 tensor."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) on int64 with wrap-around."""
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)


def uniform(*counters: Tensor) -> Tensor:
    """Uniform fp32 numbers in (0, 1) from broadcastable int64 counters."""
    state = torch.zeros((), dtype=torch.int64, device=counters[0].device)
    for counter in counters:
        state = _mix(state + counter.long() + _INCREMENT)
    # 23 bits: with 24, the half would round the largest up to 1.
    return (_shift(state, 41).float() + 0.5) * 2.0**-23
