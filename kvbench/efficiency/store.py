"""Rows of cost on disk: one line each, durable before the next cell begins."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from kvbench.efficiency.record import ROWS, EfficiencyResult, read_rows
from kvbench.harness.store import append_lines, cut_half_line, locked, not_writable


class EfficiencyStore:
    """The only writer of one folder; use it as a context manager.

    Raises:
        KvbenchError: the folder cannot be written, belongs to another writer, or holds rows of another schema.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = locked(folder)
        try:
            cut_half_line(folder / ROWS)
            stored = read_rows(folder) if (folder / ROWS).exists() else []
        except BaseException:
            os.close(self._lock)
            raise
        self._rows = {row.key: row for row in stored}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def result(self, key: str) -> EfficiencyResult | None:
        """The row of a cell, or None."""
        return self._rows.get(key)

    def add(self, row: EfficiencyResult) -> None:
        """Make a row durable."""
        try:
            append_lines(self.folder / ROWS, [row.to_json()])
        except OSError as error:
            raise not_writable(self.folder, error) from error
        self._rows[row.key] = row
