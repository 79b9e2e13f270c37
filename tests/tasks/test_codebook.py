from __future__ import annotations

import pytest

from kvbench_tasks.codebook import Codebook
from tests.tasks.families import check_hand_written

TASK = Codebook()


def test_worked_out_by_hand() -> None:
    # First digit 9 is 0 modulo 3: + a = 1099. First digit 0: + a = 199. First digit 1: + b = 449.
    check_hand_written(
        TASK,
        "<bos> codebook 0 3 c : a 1 0 0 ; b 2 5 0 ; c 0 0 7 ; sum 9 9 9 ; do",
        """
        # 0 2 c sum 9 9 9 + a 1 0 0 ;
        9 + 0 + 0 = 0 9 ; 9 + 0 + 0 = 0 9 ; 9 + 1 + 0 = 1 0 ;
        0 9 9 - 1 0 0 ; 9 - 0 - 0 = 0 9 ; 9 - 0 - 0 = 0 9 ; 0 - 1 - 0 = 1 9 ;
        sum = 0 9 9 ;
        # 0 1 c sum 0 9 9 + a 1 0 0 ;
        9 + 0 + 0 = 0 9 ; 9 + 0 + 0 = 0 9 ; 0 + 1 + 0 = 0 1 ;
        1 9 9 - 1 0 0 ; 9 - 0 - 0 = 0 9 ; 9 - 0 - 0 = 0 9 ; 1 - 1 - 0 = 0 0 ;
        sum = 1 9 9 ;
        # 0 0 c sum 1 9 9 + b 2 5 0 ;
        9 + 0 + 0 = 0 9 ; 9 + 5 + 0 = 1 4 ; 1 + 2 + 1 = 0 4 ;
        4 4 9 - 2 5 0 ; 9 - 0 - 0 = 0 9 ; 4 - 5 - 0 = 1 9 ; 4 - 2 - 1 = 0 1 ;
        sum = 4 4 9 ;
        answer 4 4 9 <eos>
        """,
        [("sum", 99), ("sum", 199), ("sum", 449)],
        "4 4 9",
    )


@pytest.mark.parametrize("level", [256, 512, 1024, 2048])
def test_some_entry_rests_long(level: int) -> None:
    """Counted from the text: which entry each step adds, and how many steps it had not been touched before."""
    for problem in TASK.problems(level, 20, seed=3):
        tokens = TASK.trace(problem).tokens
        added = [tokens[at + 9] for at, word in enumerate(tokens) if word == "#"]
        rests = [
            step - max((i for i in range(step) if added[i] == name), default=-1) for step, name in enumerate(added)
        ]
        assert max(rests) > TASK.size(level).steps // 4 + 1
