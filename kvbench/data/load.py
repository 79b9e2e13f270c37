"""A data set to records: a local copy is read as it stands, anything else through `datasets` at a known commit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kvbench.core.dataset import Rows, Source
from kvbench.core.errors import KvbenchError
from kvbench.data.files import read_local
from kvbench.data.lock import Lock


def load(source: Source, where: str | None, lock: Lock, option: str = "--data TASK=PATH") -> Rows:
    """Read a data set and hold its revision in the lock.

    Args:
        source: where it lies on the hub.
        where: a local copy: one file (.jsonl, .json, .parquet, .csv, .jsonl.gz, or .txt with a paragraph a record), a folder of
            them, or a saved data set.
        lock: what it was before.
        option: what the user has to write to name a local copy; for error messages.

    Raises:
        KvbenchError: it cannot be read, is empty, or is not what the lock says.
    """
    copy = Path(where) if where is not None else _packaged(source)
    if copy is not None:
        rows = read_local(copy, source)
    else:
        from kvbench.data.hub import read_hub

        locked = lock.revision(source.key)
        if locked is not None and locked.startswith("sha256:"):
            raise KvbenchError(
                f"Data set '{source.key}' is locked to a local copy by {lock.path}; give it with {option}, "
                "or choose another output folder with --out."
            )
        rows = read_hub(source, locked, option)
    if not len(rows):
        raise KvbenchError(f"{rows.name} has no records.")
    lock.hold(source.key, rows.revision)
    return rows


def _packaged(source: Source) -> Path | None:
    """The copy in a package, if that is installed; the package is not imported."""
    name, _, path = source.package.partition(":")
    spec = find_spec(name) if name else None
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return next((file for folder in folders if (file := Path(folder, path)).is_file()), None)
