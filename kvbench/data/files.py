"""Local copies of data sets, read as they stand: no type is guessed, no cache is written."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench.core.dataset import Record, Rows, Source
from kvbench.core.errors import KvbenchError


def read_local(path: Path, source: Source) -> Rows:
    """Read a file, a folder of data files, or a data set that `datasets` saved.

    Of a folder, the files count that the source names; without any, those that are named like the split (`test.jsonl`,
    `data/test-00000-of-00001.parquet`), below the folder named like the configuration where there is one. A single file
    counts whatever its name.

    Raises:
        KvbenchError: there is nothing to read, or it is damaged.
    """
    if path.is_file():
        files = [path]
    elif path.is_dir():
        saved = [folder for folder in (path, path / source.split) if (folder / "dataset_info.json").is_file()]
        if saved:
            return _saved(saved[0])
        files = _files_of(path, source)
    else:
        raise KvbenchError(f"There is no file or folder {path}, which was given as data set '{source.path}'.")
    digest = hashlib.sha256()
    records: list[Record] = []
    for file in files:
        content = file.read_bytes()
        digest.update(content)
        records += _parse(file, content)
    return Rows(records, str(path), f"sha256:{digest.hexdigest()}")


def _files_of(folder: Path, source: Source) -> list[Path]:
    if source.config and (folder / source.config).is_dir():
        folder = folder / source.config
    if source.files and all((folder / file).is_file() for file in source.files):
        return [folder / file for file in source.files]
    files = sorted(file for file in folder.rglob("*") if file.suffix in _READERS)
    named = [file for file in files if source.split in re.split(r"[-_.]", file.name)]
    if not named and len(files) != 1:
        found = ", ".join(file.name for file in files[:5]) or "no data file"
        raise KvbenchError(
            f"The folder {folder} has no data file of split '{source.split}' (it has {found}); "
            f"name it like {source.split}.jsonl, or give the file itself."
        )
    return named or files


def _parse(file: Path, content: bytes) -> list[Record]:
    reader = _READERS.get(file.suffix)
    if reader is None:
        raise KvbenchError(f"{file} is not a data file; kvbench reads {', '.join(_READERS)}.")
    try:
        records = reader(content)
    except ValueError as error:  # of json, UTF-8, csv and Arrow alike
        raise KvbenchError(f"{file} cannot be read as {file.suffix}: {' '.join(str(error).split())[:200]}.") from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, Mapping):
            raise KvbenchError(f"Row {number} of {file} is not a record with columns.")
    return records


def _json_lines(content: bytes) -> list[Any]:
    # Not splitlines: a text may hold other line ends than JSON's own.
    return [json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip()]


def _packed_json_lines(content: bytes) -> list[Any]:
    try:
        return _json_lines(gzip.decompress(content))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error


def _json(content: bytes) -> list[Any]:
    found = json.loads(content)
    return found if isinstance(found, list) else [found]


def _parquet(content: bytes) -> list[Any]:
    import pyarrow.parquet as pq

    return list(pq.read_table(io.BytesIO(content)).to_pylist())


def _csv(content: bytes) -> list[Any]:
    csv.field_size_limit(sys.maxsize)
    try:
        return list(csv.DictReader(io.StringIO(content.decode("utf-8"), newline=""), strict=True))
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _paragraphs(content: bytes) -> list[Any]:
    pieces = re.split(r"\n\s*\n", content.decode("utf-8"))
    return [{"text": piece.strip()} for piece in pieces if piece.strip()]


_READERS: dict[str, Callable[[bytes], list[Any]]] = {
    ".jsonl": _json_lines,
    ".gz": _packed_json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
    ".txt": _paragraphs,
}


def _saved(folder: Path) -> Rows:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise KvbenchError(
            f"The saved data set {folder} needs the package 'datasets'; pip install 'kvbench[tasks]'."
        ) from error
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.arrow")):
        digest.update(file.read_bytes())
    try:
        records = load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise KvbenchError(f"The saved data set {folder} cannot be read: {' '.join(str(error).split())}.") from error
    return Rows(records, str(folder), f"sha256:{digest.hexdigest()}")
