from __future__ import annotations

from kvbench_tasks.program import Program
from tests.tasks.families import check_hand_written

TASK = Program()


def test_worked_out_by_hand() -> None:
    # a = 234 + 5 = 239; b = 977 + 239 = 1216; c = 5 + 216 = 221; round again: a = 239 + 221 = 460.
    check_hand_written(
        TASK,
        "<bos> program 0 4 c : a 2 3 4 ; b 9 7 7 ; c 0 0 5 ; loop a + c ; b + a ; c + b ; do",
        """
        # 0 3 c a 2 3 4 + c 0 0 5 ;
        4 + 5 + 0 = 0 9 ; 3 + 0 + 0 = 0 3 ; 2 + 0 + 0 = 0 2 ;
        2 3 9 - 0 0 5 ; 9 - 5 - 0 = 0 4 ; 3 - 0 - 0 = 0 3 ; 2 - 0 - 0 = 0 2 ;
        a = 2 3 9 ;
        # 0 2 c b 9 7 7 + a 2 3 9 ;
        7 + 9 + 0 = 1 6 ; 7 + 3 + 1 = 1 1 ; 9 + 2 + 1 = 1 2 ;
        2 1 6 - 2 3 9 ; 6 - 9 - 0 = 1 7 ; 1 - 3 - 1 = 1 7 ; 2 - 2 - 1 = 1 9 ;
        b = 2 1 6 ;
        # 0 1 c c 0 0 5 + b 2 1 6 ;
        5 + 6 + 0 = 1 1 ; 0 + 1 + 1 = 0 2 ; 0 + 2 + 0 = 0 2 ;
        2 2 1 - 2 1 6 ; 1 - 6 - 0 = 1 5 ; 2 - 1 - 1 = 0 0 ; 2 - 2 - 0 = 0 0 ;
        c = 2 2 1 ;
        # 0 0 c a 2 3 9 + c 2 2 1 ;
        9 + 1 + 0 = 1 0 ; 3 + 2 + 1 = 0 6 ; 2 + 2 + 0 = 0 4 ;
        4 6 0 - 2 2 1 ; 0 - 1 - 0 = 1 9 ; 6 - 2 - 1 = 0 3 ; 4 - 2 - 0 = 0 2 ;
        a = 4 6 0 ;
        answer 4 6 0 <eos>
        """,
        [("a", 239), ("b", 216), ("c", 221), ("a", 460)],
        "4 6 0",
    )


def test_no_line_adds_a_register_to_itself() -> None:
    for problem in TASK.problems(1024, 50, seed=1):
        lines = problem.prompt.partition(" loop ")[2].removesuffix(" ; do").split(" ; ")
        assert [line[0] for line in lines] == ["a", "b", "c", "d", "e"]
        assert all(line[0] != line[4] for line in lines)
