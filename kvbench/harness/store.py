"""Rows on disk: append-only, durable before a cell counts as done, and resumable after a kill at any moment.

A folder holds `run.json` (the settings that all its rows share), `completions.jsonl`, `grades.parquet` and
`results.jsonl`. A cell is done when its line in `results.jsonl` is complete; that line is written last. Whatever else a
killed run left of an unfinished cell is cut off when the folder is opened again.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvbench.core.cell import Cell
from kvbench.core.errors import KvbenchError
from kvbench.core.result import GradeRecord, Result, grade_from
from kvbench.rows import COMPLETIONS, GRADES, MANIFEST, RESULTS, read_grades, read_results, write_grades

_LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all rows of a folder share; policies, budgets, tasks and lengths may be added later.

    Attributes:
        model, weights_hash: the model.
        problems, samples, seeds, temperature, top_p, top_k: what is measured.
        dtype, device, rows, attention: with which arithmetic.
        measurement: version of the code's numbers.
        schema: version of the rows.
    """

    model: str
    weights_hash: str
    problems: int
    samples: int
    seeds: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    dtype: str
    device: str
    rows: int
    attention: str
    measurement: int
    schema: int


@dataclass(frozen=True, kw_only=True)
class CompletionRecord:
    """One completion and its grade: enough to grade it again without a model."""

    grade: GradeRecord
    task: str
    task_version: int
    gen_length: int
    text: str

    @classmethod
    def of(cls, cell: Cell, grade: GradeRecord, text: str) -> Self:
        """One completion of a cell."""
        return cls(grade=grade, task=cell.task, task_version=cell.task_version, gen_length=cell.gen_length, text=text)

    def to_json(self) -> str:
        """One line without its end."""
        record = dataclasses.asdict(self)
        return json.dumps({**record.pop("grade"), **record}, allow_nan=False)


class Store:
    """The only writer of one folder; use it as a context manager.

    Raises:
        KvbenchError: the folder cannot be written, belongs to another writer, or holds rows of other settings.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self._lock = locked(folder)
        try:
            _check_manifest(folder / MANIFEST, settings)
            self._results = self._recover()
        except BaseException:
            self._lock_release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock_release()

    def result(self, key: str) -> Result | None:
        """The row of a cell, or None when it is not done."""
        return self._results.get(key)

    def add(self, result: Result, completions: Sequence[CompletionRecord] = ()) -> None:
        """Make a cell durable: its completions, then its grades, then the row itself. An equal row is not repeated."""
        if self._results.get(result.key) == result:
            return
        try:
            if completions:
                append_lines(self.folder / COMPLETIONS, (record.to_json() for record in completions))
                self._grades += [record.grade for record in completions]
                write_grades(self.folder / GRADES, self._grades)
            append_lines(self.folder / RESULTS, [result.to_json()])
        except OSError as error:
            raise not_writable(self.folder, error) from error
        self._results[result.key] = result

    def _recover(self) -> dict[str, Result]:
        """Cut off half-written lines, and completions and grades of cells that never got their row."""
        cut_half_line(self.folder / RESULTS)
        results = {row.key: row for row in read_results(self.folder)}
        done = {key for key, row in results.items() if row.status == "ok"}
        kept = _keep_completions(self.folder / COMPLETIONS, done)
        stored = read_grades(self.folder)
        known = {grade.key for grade in stored}
        # Grades follow from the completions, so a lost or torn side file costs nothing.
        self._grades = [g for g in stored if g.key in done] + [g for g in kept if g.key not in known]
        if self._grades != stored:
            write_grades(self.folder / GRADES, self._grades)
        return results

    def _lock_release(self) -> None:
        os.close(self._lock)


def cut_half_line(path: Path) -> None:
    """Remove what follows the last line end: a killed writer's half line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != end:
            file.truncate(position)
            os.fsync(file.fileno())


def _keep_completions(path: Path, done: set[str]) -> list[GradeRecord]:
    """Drop completions of unfinished cells and return the grades of the others.

    Cells are written one after another, so what has to go is nearly always the end of the file.
    """
    cut_half_line(path)
    if not path.exists():
        return []
    grades: list[GradeRecord] = []
    orphans = False
    with path.open(encoding="utf-8") as file:
        for line in file:
            grade = grade_from(json.loads(line))
            if grade.key in done:
                grades.append(grade)
            else:
                orphans = True
    if orphans:
        _rewrite(path, done)
    return grades


def _rewrite(path: Path, done: set[str]) -> None:
    """Write the lines of finished cells to a new file and put it in place at once."""
    fresh = path.with_suffix(".tmp")
    with path.open(encoding="utf-8") as old, fresh.open("w", encoding="utf-8") as new:
        new.writelines(line for line in old if json.loads(line)["key"] in done)
        new.flush()
        os.fsync(new.fileno())
    fresh.replace(path)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a file and wait until they are on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def locked(folder: Path) -> int:
    """Make the folder and take its lock; the system releases it when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise not_writable(folder, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        # Some network file systems have no locks: two writers are then the user's own care.
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            return os.open(folder / _LOCK, os.O_RDWR)
        raise KvbenchError(
            f"Another kvbench is writing to {folder}; wait for it, or choose another folder with --out."
        ) from error
    return handle


def not_writable(folder: Path, error: OSError) -> KvbenchError:
    """The sentence for a folder that the system refuses."""
    reason = os.strerror(error.errno or 0).lower()
    return KvbenchError(f"The output folder {folder} cannot be written ({reason}); choose another with --out.")


def _check_manifest(path: Path, settings: Settings) -> None:
    """Write the settings of a new folder, or compare them with the folder's."""
    wanted: Mapping[str, object] = json.loads(json.dumps(dataclasses.asdict(settings)))
    if not path.exists():
        if (path.parent / RESULTS).exists():
            raise KvbenchError(
                f"The output folder {path.parent} holds rows but no {MANIFEST}; choose another with --out."
            )
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise KvbenchError(f"{path} is damaged; choose another output folder with --out.")
    differences = [
        f"{name} {_show(found.get(name))} there, {_show(value)} here"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if differences:
        raise KvbenchError(
            f"The output folder {path.parent} holds another configuration ({'; '.join(differences)}); "
            "choose another with --out."
        )


def _show(value: object) -> str:
    return value[:12] if isinstance(value, str) else json.dumps(value)
