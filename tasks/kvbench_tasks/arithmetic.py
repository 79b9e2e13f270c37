"""Addition of three-digit numbers modulo 1000, every column spelled out, then checked by a subtraction.

The working of 123 + 789 is

    3 + 9 + 0 = 1 2 ; 2 + 8 + 1 = 1 1 ; 1 + 7 + 1 = 0 9 ;
    9 1 2 - 7 8 9 ; 2 - 9 - 0 = 1 3 ; 1 - 8 - 1 = 1 2 ; 9 - 7 - 1 = 0 1 ;

Columns go from the lowest digit up: digit, digit, carry (or borrow), and on the right the new carry (or borrow) and the
digit. None of it is needed once the result has been stored, which is the point: a cache has to see that.
"""

from __future__ import annotations

from string import digits

Column = tuple[str, str, str, str, str, str, str, str, str]

COLUMN = 9
"""Words of one column."""

WORKING = 3 * COLUMN + 8 + 3 * COLUMN
"""Words of the working of one addition."""

ADDITION: dict[tuple[str, str, str], Column] = {}
SUBTRACTION: dict[tuple[str, str, str], Column] = {}
for _a in digits:
    for _b in digits:
        for _c in "01":
            _carry, _digit = divmod(int(_a) + int(_b) + int(_c), 10)
            ADDITION[_a, _b, _c] = (_a, "+", _b, "+", _c, "=", str(_carry), str(_digit), ";")
            _borrow, _digit = divmod(int(_a) - int(_b) - int(_c), 10)
            SUBTRACTION[_a, _b, _c] = (_a, "-", _b, "-", _c, "=", str(-_borrow), str(_digit), ";")


def spelled_out_sum(x: str, y: str) -> tuple[list[str], str]:
    """Return the working of x + y and its three digits, all as words; `x` and `y` are three digits each."""
    low = ADDITION[x[2], y[2], "0"]
    middle = ADDITION[x[1], y[1], low[6]]
    high = ADDITION[x[0], y[0], middle[6]]
    z = high[7] + middle[7] + low[7]
    check_low = SUBTRACTION[z[2], y[2], "0"]
    check_middle = SUBTRACTION[z[1], y[1], check_low[6]]
    check_high = SUBTRACTION[z[0], y[0], check_middle[6]]
    check = (z[0], z[1], z[2], "-", y[0], y[1], y[2], ";")
    return [*low, *middle, *high, *check, *check_low, *check_middle, *check_high], z


def working_uses(x_at: int, y_at: int) -> list[tuple[int, int]]:
    """Return the uses (use, source) within one working, relative to its first word.

    Of several copies of a digit the nearest is its source: what a step copied, it need not fetch from further away.

    Args:
        x_at: where the three digits of x are, relative to the first word of the working.
        y_at: the same for y.
    """
    uses = []
    for column in range(3):
        at = column * COLUMN
        uses += [(at, x_at + 2 - column), (at + 2, y_at + 2 - column), *_column_uses(at, column)]
    check = 3 * COLUMN
    for digit in range(3):
        column_at = (2 - digit) * COLUMN
        uses += [(check + digit, column_at + 7), (check + 4 + digit, column_at + 2)]
    for column in range(3):
        at = check + 8 + column * COLUMN
        uses += [(at, check + 2 - column), (at + 2, check + 6 - column), *_column_uses(at, column)]
    return uses


def _column_uses(at: int, column: int) -> list[tuple[int, int]]:
    """Return what carry and result of a column are made from."""
    carried = [(at + 4, at - COLUMN + 6)] if column else []
    return carried + [(at + result, at + source) for result in (6, 7) for source in (0, 2, 4)]
