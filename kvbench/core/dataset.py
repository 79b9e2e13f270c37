"""What a data set is to a task: where it lies on the hub, and its records. Nothing here reads anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]
"""One record: column -> value."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set on the hub.

    Attributes:
        path: `owner/name`.
        config: of the data set; None when it has one only.
        split: of the data set.
        gated: its owner wants its terms accepted first.
        files: files of the repository to read, as JSON lines, where `datasets` no longer runs the repository's own script.
        package: a copy inside a package that may be installed, `import_name:path`; it is preferred to the hub.
    """

    path: str
    config: str | None = None
    split: str = "test"
    gated: bool = False
    files: tuple[str, ...] = ()
    package: str = ""

    @property
    def key(self) -> str:
        """How lock files call it: `openai/gsm8k[main]@test`."""
        config = f"[{self.config}]" if self.config else ""
        return f"{self.path}{config}@{self.split}"


class Rows:
    """The records of a data set in their order.

    Args:
        records: anything that has a length and gives a record for an index, such as a `datasets.Dataset`.
        name: of the file or data set, for error messages.
        revision: commit on the hub, or `sha256:` and the hash of the local files.
    """

    def __init__(self, records: Sequence[Record], name: str, revision: str) -> None:
        self._records = records
        self.name = name
        self.revision = revision

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def __iter__(self) -> Iterator[Record]:
        return (self[index] for index in range(len(self)))
