"""Result folders to rows and grades: several folders, such as the shards of one grid, make one table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.core.errors import KvbenchError
from kvbench.core.result import GradeRecord, Result
from kvbench.rows import RESULTS, read_grades, read_results

Grades = Mapping[str, Sequence[GradeRecord]]
"""Key of a cell -> its grades."""


@dataclass(frozen=True)
class Stored:
    """What result folders hold."""

    rows: tuple[Result, ...]
    grades: Grades


def load(folders: Iterable[Path]) -> Stored:
    """Read folders in order. Of rows with one key the first that is `ok` counts, whole: its grades come with it.

    Raises:
        KvbenchError: a folder holds no rows, or rows of another schema.
    """
    rows: dict[str, Result] = {}
    grades: dict[str, list[GradeRecord]] = {}
    for folder in folders:
        if not (folder / RESULTS).is_file():
            raise KvbenchError(
                f"The folder {folder} holds no rows ({RESULTS}); give the --out folder of a 'kvbench run'."
            )
        here = by_key(read_grades(folder))
        for row in read_results(folder):
            known = rows.get(row.key)
            if known is not None and (known.status == "ok" or row.status != "ok"):
                continue
            rows[row.key] = row
            grades[row.key] = list(here.get(row.key, ()))
    return Stored(tuple(rows.values()), grades)


def by_key(grades: Iterable[GradeRecord]) -> dict[str, list[GradeRecord]]:
    """Grades by the cell that they belong to."""
    found: dict[str, list[GradeRecord]] = defaultdict(list)
    for grade in grades:
        found[grade.key].append(grade)
    return dict(found)
