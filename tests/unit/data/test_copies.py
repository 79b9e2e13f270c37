"""Copies in other places: packed files, files that a source names, and installed packages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvbench.core.dataset import Source
from kvbench.core.errors import KvbenchError
from kvbench.data.load import load
from kvbench.data.lock import Lock

LINES = "".join(json.dumps({"number": number}) + "\n" for number in range(3))


def test_packed_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl.gz"
    file.write_bytes(gzip.compress(LINES.encode()))
    assert [row["number"] for row in load(Source("a/b"), str(file), Lock(tmp_path))] == [0, 1, 2]


@pytest.mark.parametrize("damage", [slice(5), slice(30), slice(1, None)])
def test_damaged_packed_lines_are_refused(tmp_path: Path, damage: slice) -> None:
    file = tmp_path / "test.jsonl.gz"
    file.write_bytes(gzip.compress(LINES.encode())[damage])
    with pytest.raises(KvbenchError, match="cannot be read as"):
        load(Source("a/b"), str(file), Lock(tmp_path))


def test_of_a_downloaded_repository_the_named_files_count(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"number": 9}\n')
    (tmp_path / "test6.jsonl").write_text(LINES)
    rows = load(Source("a/b", config="v6", files=("test6.jsonl",)), str(tmp_path), Lock(tmp_path))
    assert [row["number"] for row in rows] == [0, 1, 2]


def test_a_package_holds_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kvbench_numbers" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('it need not be imported')")
    (folder / "numbers.jsonl").write_text(LINES)
    source = Source("a/b", package="kvbench_numbers:data/numbers.jsonl")
    with pytest.raises(KvbenchError, match="cannot be read from the hub"):
        load(source, None, Lock(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    rows = load(source, None, Lock(tmp_path))
    assert len(rows) == 3
    assert rows.revision.startswith("sha256:")
