"""The files of a result folder that both the harness and the report know. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from kvbench.core.errors import KvbenchError
from kvbench.core.result import GradeRecord, Result

MANIFEST = "run.json"
RESULTS = "results.jsonl"
COMPLETIONS = "completions.jsonl"
GRADES = "grades.parquet"


class Row(Protocol):
    """What a line of a file of rows is read as."""

    @property
    def key(self) -> str:
        """Of its cell."""


R = TypeVar("R", bound=Row)


def read_results(folder: Path) -> list[Result]:
    """The rows of a folder; see `read_lines`.

    Raises:
        KvbenchError: a complete line is not a row of this schema.
    """
    path = folder / RESULTS
    return read_lines(path, Result.from_json) if path.exists() else []


def read_lines(path: Path, parse: Callable[[str], R]) -> list[R]:
    """The rows of a file, the newest of each cell, in the order in which cells were first closed.

    A half-written last line, left by a killed run or a run in progress, is not a row.

    Args:
        path: of the file.
        parse: reads one line; raises ValueError where it is not JSON, KvbenchError where it is not a row.

    Raises:
        KvbenchError: a complete line cannot be read.
    """
    rows: dict[str, R] = {}
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    for number, line in enumerate(complete.split("\n") if complete else [], start=1):
        try:
            row = parse(line)
        except ValueError as error:
            raise KvbenchError(f"Line {number} of {path} is not JSON; restore the file or delete that line.") from error
        except KvbenchError as error:
            raise KvbenchError(f"Line {number} of {path} cannot be read: {error}") from error
        rows[row.key] = row
    return list(rows.values())


def read_grades(folder: Path) -> list[GradeRecord]:
    """All grades of a folder; none when it has no readable side file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_table(folder / GRADES).to_pydict()
    except (FileNotFoundError, pa.ArrowInvalid):
        return []
    # Older files lack the columns that came later.
    names = [field.name for field in dataclasses.fields(GradeRecord) if field.name in columns]
    return [
        GradeRecord(**dict(zip(names, values, strict=True)))
        for values in zip(*(columns[n] for n in names), strict=True)
    ]


def write_grades(path: Path, grades: Sequence[GradeRecord]) -> None:
    """Replace the side file at once: a reader or a kill sees the old one or the new one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("key", pa.string()),
            ("problem", pa.string()),
            ("sample", pa.int32()),
            ("correct", pa.float64()),
            ("steps_correct", pa.float64()),
            ("tokens", pa.int32()),
            ("finished", pa.bool_()),
            ("near_ties", pa.int32()),
            ("digest", pa.string()),
            ("extracted", pa.string()),
        ]
    )
    columns = {name: [getattr(grade, name) for grade in grades] for name in schema.names}
    fresh = path.with_suffix(".tmp")
    with fresh.open("wb") as file:
        pq.write_table(pa.table(columns, schema=schema), file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
