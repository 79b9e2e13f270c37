from __future__ import annotations

from kvbench_tasks.ledger import Ledger
from tests.tasks.families import check_hand_written

TASK = Ledger()


def test_worked_out_by_hand() -> None:
    # 1 is 1 modulo 3: b = 627 + 551 = 1178. 8 is 2: c = 932 + 178 = 1110. 0: a = 390 + 110 = 500.
    check_hand_written(
        TASK,
        "<bos> ledger 0 3 c : a 3 9 0 ; b 6 2 7 ; c 9 3 2 ; start 5 5 1 ; do",
        """
        # 0 2 c b 6 2 7 + start 5 5 1 ;
        7 + 1 + 0 = 0 8 ; 2 + 5 + 0 = 0 7 ; 6 + 5 + 0 = 1 1 ;
        1 7 8 - 5 5 1 ; 8 - 1 - 0 = 0 7 ; 7 - 5 - 0 = 0 2 ; 1 - 5 - 0 = 1 6 ;
        b = 1 7 8 ;
        # 0 1 c c 9 3 2 + b 1 7 8 ;
        2 + 8 + 0 = 1 0 ; 3 + 7 + 1 = 1 1 ; 9 + 1 + 1 = 1 1 ;
        1 1 0 - 1 7 8 ; 0 - 8 - 0 = 1 2 ; 1 - 7 - 1 = 1 3 ; 1 - 1 - 1 = 1 9 ;
        c = 1 1 0 ;
        # 0 0 c a 3 9 0 + c 1 1 0 ;
        0 + 0 + 0 = 0 0 ; 9 + 1 + 0 = 1 0 ; 3 + 1 + 1 = 0 5 ;
        5 0 0 - 1 1 0 ; 0 - 0 - 0 = 0 0 ; 0 - 1 - 0 = 1 9 ; 5 - 1 - 1 = 0 3 ;
        a = 5 0 0 ;
        answer a 5 0 0 b 1 7 8 c 1 1 0 <eos>
        """,
        [("b", 178), ("c", 110), ("a", 500)],
        "a 5 0 0 b 1 7 8 c 1 1 0",
    )


def test_an_account_can_be_posted_into_itself() -> None:
    # 3 is 1 modulo 2: b = 200 + 3 = 203. 3 again: b = 203 + 203 = 406. 6 is 0: a = 100 + 406 = 506.
    prompt = "<bos> ledger 0 3 b : a 1 0 0 ; b 2 0 0 ; start 0 0 3 ; do"
    assert TASK.interpret(prompt) == ([("b", 203), ("b", 406), ("a", 506)], "a 5 0 6 b 4 0 6")
    assert TASK.solve(prompt).completion.endswith("answer a 5 0 6 b 4 0 6 <eos>")


def test_it_alone_is_held_out() -> None:
    assert TASK.held_out
