from __future__ import annotations

import pytest

from kvbench_tasks.stack import Stack
from tests.tasks.families import check_hand_written

TASK = Stack()


def test_worked_out_by_hand() -> None:
    # a = 600 is not below 500: b = 600 + 505 = 1105. b = 105 is: c = 105 + 111 = 216. Sum: 216, 321, 921.
    check_hand_written(
        TASK,
        "<bos> stack 0 2 : a 6 0 0 ; low 1 1 1 ; high 5 0 5 ; do",
        """
        # push 0 1 a 6 0 0 + high 5 0 5 ;
        0 + 5 + 0 = 0 5 ; 0 + 0 + 0 = 0 0 ; 6 + 5 + 0 = 1 1 ;
        1 0 5 - 5 0 5 ; 5 - 5 - 0 = 0 0 ; 0 - 0 - 0 = 0 0 ; 1 - 5 - 0 = 1 6 ;
        b = 1 0 5 ;
        # push 0 0 b 1 0 5 + low 1 1 1 ;
        5 + 1 + 0 = 0 6 ; 0 + 1 + 0 = 0 1 ; 1 + 1 + 0 = 0 2 ;
        2 1 6 - 1 1 1 ; 6 - 1 - 0 = 0 5 ; 1 - 1 - 0 = 0 0 ; 2 - 1 - 0 = 0 1 ;
        c = 2 1 6 ;
        # pop 0 2 sum 0 0 0 + c 2 1 6 ;
        0 + 6 + 0 = 0 6 ; 0 + 1 + 0 = 0 1 ; 0 + 2 + 0 = 0 2 ;
        2 1 6 - 2 1 6 ; 6 - 6 - 0 = 0 0 ; 1 - 1 - 0 = 0 0 ; 2 - 2 - 0 = 0 0 ;
        sum = 2 1 6 ;
        # pop 0 1 sum 2 1 6 + b 1 0 5 ;
        6 + 5 + 0 = 1 1 ; 1 + 0 + 1 = 0 2 ; 2 + 1 + 0 = 0 3 ;
        3 2 1 - 1 0 5 ; 1 - 5 - 0 = 1 6 ; 2 - 0 - 1 = 0 1 ; 3 - 1 - 0 = 0 2 ;
        sum = 3 2 1 ;
        # pop 0 0 sum 3 2 1 + a 6 0 0 ;
        1 + 0 + 0 = 0 1 ; 2 + 0 + 0 = 0 2 ; 3 + 6 + 0 = 0 9 ;
        9 2 1 - 6 0 0 ; 1 - 0 - 0 = 0 1 ; 2 - 0 - 0 = 0 2 ; 9 - 6 - 0 = 0 3 ;
        sum = 9 2 1 ;
        answer 9 2 1 <eos>
        """,
        [("b", 105), ("c", 216), ("sum", 216), ("sum", 321), ("sum", 921)],
        "9 2 1",
    )


def test_499_is_low_and_500_is_high() -> None:
    for first, added in (("4 9 9", 1), ("5 0 0", 2)):
        stored, _ = TASK.interpret(f"<bos> stack 0 1 : a {first} ; low 0 0 1 ; high 0 0 2 ; do")
        assert stored[0] == ("b", int(first.replace(" ", "")) + added)


@pytest.mark.parametrize("level", [512, 1024, 2048, 4096])
def test_the_furthest_look_up(level: int) -> None:
    """What was pushed first was last touched in the first step, and comes back in the last; a step has 82 words."""
    pushes = TASK.size(level).items - 1
    steps = 2 * pushes + 1
    assert steps == TASK.size(level).steps
    before_the_popped_name = 9  # `# pop 0 0 sum 3 2 1 +`
    reach = 82 * (steps - 2) + before_the_popped_name
    assert {max(TASK.trace(problem).reaches) for problem in TASK.problems(level, 3, seed=5)} == {reach}
