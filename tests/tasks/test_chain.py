from __future__ import annotations

import pytest

from kvbench_tasks.chain import Chain
from tests.tasks.families import check_hand_written

TASK = Chain()


def test_worked_out_by_hand() -> None:
    # From b: 265 + 63 = 328, to a: 328 + 416 = 744, to c: 744 + 500 = 1244.
    check_hand_written(
        TASK,
        "<bos> chain 0 3 : a -> c 4 1 6 ; b -> a 0 6 3 ; c -> b 5 0 0 ; sum 2 6 5 ; start b ; do",
        """
        # 0 2 b -> a sum 2 6 5 + b 0 6 3 ;
        5 + 3 + 0 = 0 8 ; 6 + 6 + 0 = 1 2 ; 2 + 0 + 1 = 0 3 ;
        3 2 8 - 0 6 3 ; 8 - 3 - 0 = 0 5 ; 2 - 6 - 0 = 1 6 ; 3 - 0 - 1 = 0 2 ;
        sum = 3 2 8 ;
        # 0 1 a -> c sum 3 2 8 + a 4 1 6 ;
        8 + 6 + 0 = 1 4 ; 2 + 1 + 1 = 0 4 ; 3 + 4 + 0 = 0 7 ;
        7 4 4 - 4 1 6 ; 4 - 6 - 0 = 1 8 ; 4 - 1 - 1 = 0 2 ; 7 - 4 - 0 = 0 3 ;
        sum = 7 4 4 ;
        # 0 0 c -> b sum 7 4 4 + c 5 0 0 ;
        4 + 0 + 0 = 0 4 ; 4 + 0 + 0 = 0 4 ; 7 + 5 + 0 = 1 2 ;
        2 4 4 - 5 0 0 ; 4 - 0 - 0 = 0 4 ; 4 - 0 - 0 = 0 4 ; 2 - 5 - 0 = 1 7 ;
        sum = 2 4 4 ;
        answer 2 4 4 <eos>
        """,
        [("sum", 328), ("sum", 744), ("sum", 244)],
        "2 4 4",
    )


@pytest.mark.parametrize("level", [128, 512, 2048, 4096])
def test_the_nodes_form_one_cycle(level: int) -> None:
    for problem in TASK.problems(level, 20, seed=2):
        tokens = problem.prompt.split()
        after = {tokens[at - 1]: tokens[at + 1] for at, word in enumerate(tokens) if word == "->"}
        here, visited = "a", set()
        while here not in visited:
            visited.add(here)
            here = after[here]
        assert here == "a"
        assert len(visited) == len(after) == TASK.size(level).items
