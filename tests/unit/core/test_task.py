"""Live sets of a trace that was made by hand."""

from __future__ import annotations

from kvbench.core.task import Trace, ages, last_uses, live_set_sizes

# Positions 0 to 3 are the prompt; 4 is made from 0 and 3, 5 from 4, 6 from 1, 7 from 4 and 0.
TRACE = Trace(list("abcdefgh"), 4, [(4, 0), (4, 3), (5, 4), (6, 1), (7, 4), (7, 0)])


def test_completion() -> None:
    assert TRACE.completion == "e f g h"


def test_last_uses() -> None:
    assert last_uses(TRACE) == [7, 6, -1, 4, 7, -1, -1, -1]


def test_ages() -> None:
    assert ages(TRACE) == [4, 1, 1, 5, 3, 7]


def test_live_at_each_position() -> None:
    # 0 is live at 0..6, 1 at 1..5, 3 at 3, 4 at 4..6.
    assert live_set_sizes(TRACE) == [1, 2, 2, 3, 3, 3, 2, 0]


def test_young_tokens_and_the_first_do_not_count() -> None:
    # At least 2 old: 0 at 2..6, 1 at 3..5, 3 never, 4 at 6.
    assert live_set_sizes(TRACE, min_age=2) == [0, 0, 1, 2, 2, 2, 2, 0]
    assert live_set_sizes(TRACE, min_age=2, first=1) == [0, 0, 0, 1, 1, 1, 1, 0]


def test_what_is_used_by_its_neighbour_is_live_once() -> None:
    assert live_set_sizes(Trace(list("ab"), 1, [(1, 0)])) == [1, 0]
    assert live_set_sizes(Trace(list("ab"), 1, [])) == [0, 0]
