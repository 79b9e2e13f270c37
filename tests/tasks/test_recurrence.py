from __future__ import annotations

import pytest

from kvbench_tasks.recurrence import Recurrence
from tests.tasks.families import check_hand_written

TASK = Recurrence()


def test_worked_out_by_hand() -> None:
    # a = 123 + 789 = 912; b = 789 + 912 = 1701; a = 912 + 701 = 1613.
    check_hand_written(
        TASK,
        "<bos> recurrence 0 3 b : a 1 2 3 ; b 7 8 9 ; do",
        """
        # 0 2 b a 1 2 3 + b 7 8 9 ;
        3 + 9 + 0 = 1 2 ; 2 + 8 + 1 = 1 1 ; 1 + 7 + 1 = 0 9 ;
        9 1 2 - 7 8 9 ; 2 - 9 - 0 = 1 3 ; 1 - 8 - 1 = 1 2 ; 9 - 7 - 1 = 0 1 ;
        a = 9 1 2 ;
        # 0 1 b b 7 8 9 + a 9 1 2 ;
        9 + 2 + 0 = 1 1 ; 8 + 1 + 1 = 1 0 ; 7 + 9 + 1 = 1 7 ;
        7 0 1 - 9 1 2 ; 1 - 2 - 0 = 1 9 ; 0 - 1 - 1 = 1 8 ; 7 - 9 - 1 = 1 7 ;
        b = 7 0 1 ;
        # 0 0 b a 9 1 2 + b 7 0 1 ;
        2 + 1 + 0 = 0 3 ; 1 + 0 + 0 = 0 1 ; 9 + 7 + 0 = 1 6 ;
        6 1 3 - 7 0 1 ; 3 - 1 - 0 = 0 2 ; 1 - 0 - 0 = 0 1 ; 6 - 7 - 0 = 1 9 ;
        a = 6 1 3 ;
        answer 6 1 3 <eos>
        """,
        [("a", 912), ("b", 701), ("a", 613)],
        "6 1 3",
    )


def test_zeros_and_carries_to_the_end() -> None:
    stored, answer = TASK.interpret("<bos> recurrence 0 2 b : a 0 0 0 ; b 9 9 9 ; do")
    assert (stored, answer) == ([("a", 999), ("b", 998)], "9 9 8")  # 0 + 999; 999 + 999 = 1998


@pytest.mark.parametrize("level", [512, 1024, 2048, 4096])
def test_the_furthest_look_up(level: int) -> None:
    """It is for the last but one register: in the prompt, and m - 2 steps of 82 words before its first use."""
    registers = TASK.size(level).items
    prompt = 7 + 5 * registers
    ended = 6 + 5 * (registers - 2) + 3
    needed = prompt + 82 * (registers - 2) + 4
    assert {max(TASK.trace(problem).reaches) for problem in TASK.problems(level, 3, seed=5)} == {needed - ended}
