from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbench.core.dataset import Source
from kvbench.core.errors import KvbenchError
from kvbench.data.load import load
from kvbench.data.lock import LOCK, Lock

RECORDS = [{"problem": "1 + 1?\u2028", "answer": "002"}, {"problem": 'a\n"b", c', "answer": "1,5"}]
SOURCE = Source("owner/sums")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path)
    elif path.suffix == ".csv":
        path.write_text('problem,answer\r\n1 + 1?\u2028,002\r\n"a\n""b"", c","1,5"\r\n', encoding="utf-8", newline="")
    elif path.suffix == ".json":
        path.write_text(json.dumps(RECORDS), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in RECORDS), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
def test_a_file_is_read_as_it_stands(tmp_path: Path, suffix: str) -> None:
    rows = load(SOURCE, str(write(tmp_path / f"any.{suffix}")), Lock(tmp_path))
    assert list(rows) == RECORDS
    assert (len(rows), rows[1]["answer"]) == (2, "1,5")


def test_a_folder_is_read_by_split_and_configuration(tmp_path: Path) -> None:
    for name in ("main/train.jsonl", "other/test.jsonl", "README.md"):
        write(tmp_path / name)
    write(tmp_path / "main" / "test-00000-of-00002.parquet")
    write(tmp_path / "main" / "test-00001-of-00002.parquet")
    rows = load(Source("owner/sums", "main"), str(tmp_path), Lock(tmp_path / "out"))
    assert list(rows) == RECORDS * 2
    assert len(load(SOURCE, str(tmp_path / "other"), Lock(tmp_path / "out"))) == 2


def test_a_single_file_of_a_folder_needs_no_name(tmp_path: Path) -> None:
    write(tmp_path / "data" / "sums.jsonl")
    assert list(load(SOURCE, str(tmp_path / "data"), Lock(tmp_path))) == RECORDS


def test_a_saved_data_set_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list(RECORDS)
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made.select([0]), "test": made}).save_to_disk(str(tmp_path / "several"))
    one = load(SOURCE, str(tmp_path / "one"), Lock(tmp_path))
    assert list(one) == RECORDS
    assert list(load(SOURCE, str(tmp_path / "several"), Lock(tmp_path))) == RECORDS


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.jsonl", b"", "none.jsonl has no records"),
        ("bad.jsonl", b"{", "bad.jsonl cannot be read as .jsonl"),
        ("bad.json", b"\xff", "bad.json cannot be read as .json"),
        ("bad.parquet", b"PAR1", "bad.parquet cannot be read as .parquet"),
        ("bad.csv", b'a,b\n"1', "bad.csv cannot be read as .csv"),
        ("list.jsonl", b"[1]\n", "Row 1 of"),
        ("data.xml", b"x", "data.xml is not a data file; kvbench reads .jsonl, "),
        ("folder/a.jsonl", b"{}\n", None),
        ("two/a.jsonl", b"{}\n", "has no data file of split 'test'"),
    ],
)
def test_a_damaged_copy_is_one_sentence(tmp_path: Path, name: str, content: bytes, sentence: str | None) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if name.startswith("two"):
        (path.parent / "b.jsonl").write_bytes(content)
    if sentence is None:
        assert len(load(SOURCE, str(path.parent), Lock(tmp_path))) == 1
        return
    with pytest.raises(KvbenchError) as error:
        load(SOURCE, str(path.parent if "/" in name else path), Lock(tmp_path / "out"))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_the_lock_holds_what_was_read_and_nothing_else(tmp_path: Path) -> None:
    copy = write(tmp_path / "copy.jsonl")
    lock = Lock(tmp_path)
    lock.write()
    assert not (tmp_path / LOCK).exists()
    rows = load(SOURCE, str(copy), lock)
    lock.write()
    assert json.loads((tmp_path / LOCK).read_text("utf-8")) == {"owner/sums@test": rows.revision}
    again = Lock(tmp_path)
    assert load(SOURCE, str(copy), again).revision == rows.revision
    copy.write_text('{"problem": "2?", "answer": "2"}\n', encoding="utf-8")
    with pytest.raises(KvbenchError, match="locks it to"):
        load(SOURCE, str(copy), again)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}'])
def test_a_damaged_lock_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text, encoding="utf-8")
    with pytest.raises(KvbenchError, match="is damaged"):
        Lock(tmp_path)


class Hub:
    """Stands in for `datasets` and the hub's client; notes what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(dataset_info=self.info))
        monkeypatch.setattr("datasets.load_dataset", self.load)

    def info(self, path: str, revision: str | None, timeout: float) -> Any:
        return SimpleNamespace(sha=revision or COMMIT)

    def load(self, *path: Any, **more: Any) -> Any:
        import datasets

        self.asked.append((*path, more))
        if self.error is not None:
            raise self.error
        return datasets.Dataset.from_list(RECORDS)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    pytest.importorskip("datasets")
    return Hub(monkeypatch)


def test_the_hub_is_read_at_a_commit_that_the_lock_keeps(hub: Hub, tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    rows = load(Source("owner/sums", "main"), None, lock)
    assert (list(rows), rows.revision) == (RECORDS, COMMIT)
    lock.write()
    (tmp_path / LOCK).write_text(json.dumps({"owner/sums[main]@test": "f" * 40}), encoding="utf-8")
    assert load(Source("owner/sums", "main"), None, Lock(tmp_path)).revision == "f" * 40
    assert hub.asked == [
        ("owner/sums", "main", {"split": "test", "revision": COMMIT}),
        ("owner/sums", "main", {"split": "test", "revision": "f" * 40}),
    ]


def test_a_repository_with_a_script_is_read_by_its_files(hub: Hub, tmp_path: Path) -> None:
    load(Source("owner/sums", files=("test6.jsonl",)), None, Lock(tmp_path))
    files = [f"hf://datasets/owner/sums@{COMMIT}/test6.jsonl"]
    assert hub.asked == [("json", {"data_files": files, "split": "train"})]


def test_a_gated_data_set_says_what_access_needs(hub: Hub, tmp_path: Path) -> None:
    hub.error = RuntimeError("403")
    with pytest.raises(KvbenchError) as error:
        load(Source("owner/sums", gated=True), None, Lock(tmp_path), "--data sums=PATH")
    for part in ("'owner/sums'", "accept its terms on https://", "hf auth login", "--data sums=PATH"):
        assert part in str(error.value)
    hub.error = ValueError("odd")
    with pytest.raises(KvbenchError) as error:
        load(SOURCE, None, Lock(tmp_path))
    assert "gated" not in str(error.value)
