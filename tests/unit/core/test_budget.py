from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.budget import Budget, parse_cr, slots_for
from kvbench.core.errors import KvbenchError


@pytest.mark.parametrize(
    ("text", "length", "slots"),
    [
        ("0.88", 16384, 1966),
        ("7/8", 16384, 2048),
        ("0.875", 16384, 2048),
        ("0", 100, 100),
        ("0.0", 1, 1),
        ("0.5", 1, 1),
        ("0.5", 3, 2),  # 1.5 rounds up
        ("0.5", 5, 3),  # 2.5 rounds up, not to even
        ("0.75", 2, 1),
        ("0.9999", 10, 1),  # never none
        (" .75 ", 1024, 256),
        ("1/3", 3, 2),
    ],
)
def test_slots_of_a_ratio(text: str, length: int, slots: int) -> None:
    budget = Budget.from_cr(parse_cr(text), length)
    assert budget == Budget(slots, length)


def test_the_cent_ratios_are_exact_fractions() -> None:
    assert [parse_cr(f"0.{cents:02}") for cents in range(100)] == [Fraction(cents, 100) for cents in range(100)]


@pytest.mark.parametrize("length", range(1, 51))
def test_slots_round_half_up(length: int) -> None:
    for cents in range(100):
        kept = (100 - cents) * length  # in hundredths of a slot
        whole, rest = divmod(kept, 100)
        assert slots_for(Fraction(cents, 100), length) == max(1, whole + (rest >= 50))


@given(st.fractions(0, 1).filter(lambda cr: cr < 1), st.integers(1, 10**6))
def test_slots_are_the_nearest_integer(cr: Fraction, length: int) -> None:
    slots = slots_for(cr, length)
    kept = (1 - cr) * length
    assert slots == 1 or Fraction(-1, 2) < slots - kept <= Fraction(1, 2)
    assert 1 <= slots <= length


@pytest.mark.parametrize(
    "text",
    ["abc", "", " ", ".", "/", "1/0", "0/0", "nan", "inf", "-inf", "1e-1", "0,88", "88%", "--0.1", "-", "+0.5", "0.5 0.5",
     "1/2/3", "0x1", "1_0/20", "½", "0." + "1" * 5000],
)  # fmt: skip
def test_what_is_not_a_number_is_refused(text: str) -> None:
    with pytest.raises(KvbenchError, match="is not a number"):
        parse_cr(text)


@pytest.mark.parametrize("text", ["1", "1.0", "-0.1", "-1/8", "2", "8/7", "100"])
def test_what_is_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(KvbenchError, match="outside 0 <= cr < 1"):
        parse_cr(text)


@given(st.text(max_size=8))
def test_any_text_is_a_ratio_or_refused(text: str) -> None:
    with suppress(KvbenchError):
        assert 0 <= parse_cr(text) < 1


@pytest.mark.parametrize(("slots", "length"), [(0, 5), (5, 0), (-1, 5)])
def test_an_empty_budget_is_refused(slots: int, length: int) -> None:
    with pytest.raises(KvbenchError, match="at least one slot"):
        Budget(slots, length)


def test_requested_cr_is_never_negative() -> None:
    assert Budget(200, 100).cr == 0
    assert Budget(25, 100).cr == 0.75
