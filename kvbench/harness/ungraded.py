"""Generations whose grader failed or was interrupted, kept so that the next run grades them instead of making them again."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from kvbench.core.errors import KvbenchError
from kvbench.core.result import Environment
from kvbench.engine.requests import Audit, Completion, Generation, Timing

_FOLDER = "ungraded"


@dataclass(frozen=True)
class Kept:
    """A generation, and what made it."""

    generation: Generation
    commit: str | None
    environment: Environment


class Ungraded:
    """Files `ungraded/KEY.json` of an output folder, one a cell: processes need not wait for one another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER

    def put(self, key: str, kept: Kept) -> None:
        """Writes a file at once, or not at all.

        Raises:
            KvbenchError: the folder cannot be written.
        """
        path = self._path(key)
        fresh = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(exist_ok=True)
            fresh.write_text(json.dumps(dataclasses.asdict(kept)), encoding="utf-8")
            fresh.replace(path)
        except OSError as error:
            raise KvbenchError(f"The completions could not be kept in {path} ({error.strerror}).") from error

    def get(self, key: str) -> Kept | None:
        """What is kept of a cell; None without."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            told = record["generation"]
            made = [Completion(**{**one, "tokens": tuple(one["tokens"])}) for one in told.pop("completions")]
            audit = told.pop("audit")
            audit["head_entries"] = tuple(tuple(layer) for layer in audit["head_entries"])
            generation = Generation(tuple(made), Audit(**audit), Timing(**told.pop("timing")), **told)
            return Kept(generation, record["commit"], Environment(**record["environment"]))
        except (ValueError, TypeError, KeyError) as error:
            raise KvbenchError(f"{path} is damaged; remove it, and the cell is generated again.") from error

    def drop(self, key: str) -> None:
        """Removes what is kept of a cell, when its row is written."""
        path = self._path(key)
        if path.exists():
            path.unlink()
            if not any(self._folder.iterdir()):
                self._folder.rmdir()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"
