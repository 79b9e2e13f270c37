from __future__ import annotations

import random

from kvbench_tasks.arithmetic import ADDITION, COLUMN, SUBTRACTION, WORKING, spelled_out_sum, working_uses


def test_every_column_of_an_addition() -> None:
    assert len(ADDITION) == 200
    for (a, b, carry), words in ADDITION.items():
        total = int(a) + int(b) + int(carry)
        assert " ".join(words) == f"{a} + {b} + {carry} = {total // 10} {total % 10} ;"


def test_every_column_of_a_subtraction() -> None:
    assert len(SUBTRACTION) == 200
    for (a, b, borrow), words in SUBTRACTION.items():
        rest = int(a) - int(b) - int(borrow)
        assert " ".join(words) == f"{a} - {b} - {borrow} = {int(rest < 0)} {rest + 10 * (rest < 0)} ;"


def test_worked_out_by_hand() -> None:
    words, result = spelled_out_sum("123", "789")
    assert result == "912"
    assert " ".join(words) == (
        "3 + 9 + 0 = 1 2 ; 2 + 8 + 1 = 1 1 ; 1 + 7 + 1 = 0 9 ; "
        "9 1 2 - 7 8 9 ; 2 - 9 - 0 = 1 3 ; 1 - 8 - 1 = 1 2 ; 9 - 7 - 1 = 0 1 ;"
    )


def test_results_are_sums_modulo_1000() -> None:
    rng = random.Random(0)
    pairs = [(rng.randrange(1000), rng.randrange(1000)) for _ in range(500)]
    for x, y in [*pairs, (0, 0), (999, 999), (999, 1), (500, 500)]:
        words, result = spelled_out_sum(f"{x:03d}", f"{y:03d}")
        assert int(result) == (x + y) % 1000
        assert len(words) == WORKING == 62
        # The check ends with x again: its columns give the digits from the lowest up.
        assert "".join(reversed([words[35 + COLUMN * column + 7] for column in range(3)])) == f"{x:03d}"


def test_every_digit_follows_from_what_it_is_said_to_use() -> None:
    """The same place and the same used words give the same word, over many sums; and nothing looks ahead."""
    x_at, y_at = -9, -4  # `x x x ; . y y y ; .` before the working, as far as its uses are concerned
    uses: dict[int, list[int]] = {}
    for use, source in working_uses(x_at, y_at):
        assert source < use
        uses.setdefault(use, []).append(source)
    assert set(uses) <= set(range(WORKING))
    seen: dict[tuple[int, tuple[str, ...]], str] = {}
    rng = random.Random(1)
    for _ in range(2000):
        x, y = f"{rng.randrange(1000):03d}", f"{rng.randrange(1000):03d}"
        words, _ = spelled_out_sum(x, y)
        before = {**{x_at + i: x[i] for i in range(3)}, **{y_at + i: y[i] for i in range(3)}}
        for at, word in enumerate(words):
            known = tuple(before[s] if s < 0 else words[s] for s in uses.get(at, ()))
            assert seen.setdefault((at, known), word) == word
