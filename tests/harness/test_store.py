from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.cell import Cell
from kvbench.core.errors import KvbenchError
from kvbench.core.result import GradeRecord, Result
from kvbench.harness.store import CompletionRecord, Settings, Store
from kvbench.rows import COMPLETIONS, GRADES, MANIFEST, RESULTS, read_grades, read_results

MakeCell = Callable[..., Cell]


def completions(cell: Cell, count: int = 2) -> list[CompletionRecord]:
    return [
        CompletionRecord(
            grade=GradeRecord(
                key=cell.key,
                problem=f"p{i}",
                sample=0,
                correct=1.0,
                steps_correct=None,
                tokens=3,
                finished=True,
                near_ties=0,
                digest="d",
            ),
            task=cell.task,
            task_version=1,
            gen_length=8,
            text="zwölf",
        )
        for i in range(count)
    ]


def fill(folder: Path, settings: Settings, *cells: Cell) -> None:
    with Store(folder, settings) as store:
        for cell in cells:
            store.add(Result.of(cell, "ok"), completions(cell))


def test_rows_completions_and_grades_lie_together(tmp_path: Path, settings: Settings, cell: MakeCell) -> None:
    first, second = cell(), cell(seed=1)
    fill(tmp_path, settings, first, second)
    assert [row.key for row in read_results(tmp_path)] == [first.key, second.key]
    assert [grade.key for grade in read_grades(tmp_path)] == [first.key] * 2 + [second.key] * 2
    assert len((tmp_path / COMPLETIONS).read_text().splitlines()) == 4
    assert json.loads((tmp_path / MANIFEST).read_text())["seeds"] == [0]


@pytest.mark.parametrize("cut", [1, 30])
def test_a_half_written_row_is_cut_off_with_what_belonged_to_it(
    tmp_path: Path, settings: Settings, cell: MakeCell, cut: int
) -> None:
    first, second = cell(), cell(seed=1)
    fill(tmp_path, settings, first, second)
    path = tmp_path / RESULTS
    path.write_bytes(path.read_bytes()[:-cut])
    assert [row.key for row in read_results(tmp_path)] == [first.key]
    with Store(tmp_path, settings) as store:
        assert store.result(first.key) is not None
        assert store.result(second.key) is None
    assert path.read_bytes().endswith(b"\n")
    assert [grade.key for grade in read_grades(tmp_path)] == [first.key] * 2
    assert len((tmp_path / COMPLETIONS).read_text().splitlines()) == 2
    fill(tmp_path, settings, second)
    assert [row.key for row in read_results(tmp_path)] == [first.key, second.key]
    assert len(read_grades(tmp_path)) == 4


def test_a_half_written_completion_is_cut_off(tmp_path: Path, settings: Settings, cell: MakeCell) -> None:
    fill(tmp_path, settings, cell())
    with (tmp_path / COMPLETIONS).open("a") as file:
        file.write(completions(cell(seed=1))[0].to_json() + "\n" + '{"key": "ab')
    with Store(tmp_path, settings):
        pass
    assert len((tmp_path / COMPLETIONS).read_text().splitlines()) == 2


@pytest.mark.parametrize("damage", [b"", b"PAR1 torn", None])
def test_lost_grades_come_back_from_the_completions(
    tmp_path: Path, settings: Settings, cell: MakeCell, damage: bytes | None
) -> None:
    fill(tmp_path, settings, cell(), cell(seed=1))
    before = read_grades(tmp_path)
    if damage is None:
        (tmp_path / GRADES).unlink()
    else:
        (tmp_path / GRADES).write_bytes(damage)
    assert read_grades(tmp_path) == []
    with Store(tmp_path, settings):
        pass
    assert read_grades(tmp_path) == before


def test_grades_outlive_the_completions(tmp_path: Path, settings: Settings, cell: MakeCell) -> None:
    fill(tmp_path, settings, cell())
    (tmp_path / COMPLETIONS).unlink()
    fill(tmp_path, settings, cell(seed=1))
    assert len(read_grades(tmp_path)) == 4


def test_a_failed_cell_is_replaced_by_its_second_try(tmp_path: Path, settings: Settings, cell: MakeCell) -> None:
    with Store(tmp_path, settings) as store:
        store.add(Result.of(cell(), "failed", "it broke"))
        store.add(Result.of(cell(), "ok"), completions(cell()))
    (row,) = read_results(tmp_path)
    assert row.status == "ok"


def test_an_equal_row_is_not_repeated(tmp_path: Path, settings: Settings, cell: MakeCell) -> None:
    for _ in range(2):
        with Store(tmp_path, settings) as store:
            store.add(Result.of(cell(), "skipped", "too small"))
    assert len((tmp_path / RESULTS).read_text().splitlines()) == 1


def test_another_configuration_is_never_mixed_in(tmp_path: Path, settings: Settings, cell: MakeCell) -> None:
    fill(tmp_path, settings, cell())
    with pytest.raises(
        KvbenchError, match=r"another configuration \(problems 4 there, 5 here; seeds \[0\] there, \[1\]"
    ):
        Store(tmp_path, replace(settings, problems=5, seeds=(1,)))
    fill(tmp_path, settings, cell(seed=1))


def test_rows_without_settings_are_not_added_to(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / RESULTS).touch()
    with pytest.raises(KvbenchError, match=r"rows but no run\.json"):
        Store(tmp_path, settings)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_damaged_settings(tmp_path: Path, settings: Settings, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(KvbenchError, match="damaged"):
        Store(tmp_path, settings)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, settings: Settings, cell: MakeCell) -> None:
    fill(tmp_path, settings, cell(), cell(seed=1))
    path = tmp_path / RESULTS
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{", *lines[1:]]) + "\n")
    with pytest.raises(KvbenchError, match=r"Line 1 of .* is not JSON"):
        Store(tmp_path, settings)


def test_a_file_in_the_way(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "taken").touch()
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(KvbenchError, match=r"cannot be written \(.*\); choose another with --out"):
            Store(folder, settings)


def test_a_full_disk_is_one_sentence(
    tmp_path: Path, settings: Settings, cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    with Store(tmp_path, settings) as store:
        monkeypatch.setattr("os.fsync", no_space)
        with pytest.raises(KvbenchError, match="no space left on device"):
            store.add(Result.of(cell(), "ok"))


def test_two_writers_are_one_too_many(tmp_path: Path, settings: Settings) -> None:
    holder = (
        "import fcntl, os, sys; h = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); "
        "fcntl.flock(h, 2); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(KvbenchError, match="Another kvbench is writing"):
            Store(tmp_path, settings)
        other.communicate("")
    Store(tmp_path, settings).__exit__(None, None, None)
