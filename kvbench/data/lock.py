"""The lock file of a folder: which revision of each data set its rows were measured on."""

from __future__ import annotations

import json
from pathlib import Path

from kvbench.core.errors import KvbenchError

LOCK = "datasets.lock.json"


class Lock:
    """Revisions by data set: those of an existing lock file bind, new ones are kept until `write`.

    Args:
        folder: where the lock file lies or will lie.

    Raises:
        KvbenchError: the file is not a lock file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._revisions: dict[str, str] = {}
        if not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise KvbenchError(f"{self.path} is damaged; restore it, or choose another output folder with --out.")
        self._revisions = found

    def revision(self, data_set: str) -> str | None:
        """What a data set is locked to."""
        return self._revisions.get(data_set)

    def hold(self, data_set: str, revision: str) -> None:
        """Note the revision that was read.

        Raises:
            KvbenchError: the data set is locked to another one.
        """
        locked = self._revisions.setdefault(data_set, revision)
        if locked != revision:
            raise KvbenchError(
                f"Data set '{data_set}' is at revision {revision[:19]}, but {self.path} locks it to {locked[:19]}; "
                "give what it was, or choose another output folder with --out."
            )

    def write(self) -> None:
        """Replace the file if something is new; without data sets there is none."""
        text = json.dumps(self._revisions, indent=2, sort_keys=True) + "\n"
        if not self._revisions or (self.path.exists() and self.path.read_text(encoding="utf-8") == text):
            return
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.path)
