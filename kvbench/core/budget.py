"""How much a policy may keep: compression ratios in exact fractions, and slots per layer and KV head."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kvbench.core.errors import KvbenchError

_RATIO = re.compile(r"\d+/\d+|\d*\.?\d+|\d+\.")


def parse_cr(text: str) -> Fraction:
    """The fraction of the dense cache removed, from a decimal (`0.88`) or a fraction (`7/8`).

    Raises:
        KvbenchError: the text is not a number, or not in 0 <= cr < 1.
    """
    cleaned = text.strip()
    try:
        cr = Fraction(cleaned) if _RATIO.fullmatch(cleaned.lstrip("-")) else None
    except (ValueError, ZeroDivisionError):
        cr = None
    if cr is None:
        raise KvbenchError(
            f"The compression ratio '{text}' is not a number; write a decimal (0.88) or a fraction (7/8)."
        )
    if not 0 <= cr < 1:
        raise KvbenchError(
            f"The compression ratio {text} is outside 0 <= cr < 1; it is the fraction of the cache removed (0.88 keeps 12 %)."
        )
    return cr


def slots_for(cr: Fraction, reference_length: int) -> int:
    """`max(1, round_half_up((1 - cr) * reference_length))`, computed without floating point."""
    kept = (1 - cr) * reference_length
    return max(1, int((2 * kept + 1) // 2))


@dataclass(frozen=True)
class Budget:
    """Slots per layer and KV head.

    Attributes:
        slots: entries that may be stored, everything that the policy charges included.
        reference_length: tokens that the dense cache is taken to hold.
    """

    slots: int
    reference_length: int

    def __post_init__(self) -> None:
        if self.slots < 1 or self.reference_length < 1:
            raise KvbenchError(
                f"A budget needs at least one slot and one token, not {self.slots} of {self.reference_length}."
            )

    @classmethod
    def from_cr(cls, cr: Fraction, reference_length: int) -> Budget:
        """The budget that removes the fraction `cr` of `reference_length` tokens."""
        return cls(slots_for(cr, reference_length), reference_length)

    @property
    def cr(self) -> float:
        """The requested fraction removed; never below zero."""
        return max(0.0, 1 - self.slots / self.reference_length)
