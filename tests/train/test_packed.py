from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kvbench.core.errors import KvbenchError
from kvbench.core.policy import LearnedPolicy
from kvbench.data.lock import LOCK, Lock
from kvbench.models.checkpoint import build_policy
from kvbench.models.source import LoadedModel
from kvbench.plugins import load_registry
from kvbench.train.packed import PackedRows
from kvbench.train.recipe import Recipe
from kvbench.train.resume import LOG
from kvbench.train.sources import row_source
from kvbench.train.trainer import Trainer
from kvbench_tasks.vocabulary import VOCABULARY, build_tokenizer

WORDS = [word for word in VOCABULARY if not word.startswith("<")]


def _texts(count: int = 40) -> list[str]:
    """Every document has words of its own number only, so that rows say what they were made from."""
    return [" ".join([WORDS[n % len(WORDS)]] * (20 + 3 * (n % 7))) for n in range(count)]


def _recipe(path: Path, **more: Any) -> Recipe:
    data = {"path": str(path), **more}
    return Recipe(
        steps=6, tokens=260, levels={128: 1.0}, crs=("0.5",), data=data, boundary_queries=16, boundary_future=16,
        eval_every=4, eval_rows=2, save_every=2, warmup=2, policy={"window": 8, "sinks": 2},
    )  # fmt: skip


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in _texts()))
    return path


def _rows(recipe: Recipe, lock: Path, seed: int = 0) -> PackedRows:
    rows = row_source(recipe, build_tokenizer(), Lock(lock), seed)
    assert isinstance(rows, PackedRows)
    return rows


def test_rows_are_whole_documents_end_to_end(jsonl: Path, tmp_path: Path) -> None:
    rows = _rows(_recipe(jsonl, reset=True), tmp_path)
    known = {tuple(rows._document(index)) for index in range(len(rows.records))}
    end = VOCABULARY.index("<eos>")
    assert all(document[-1] == end for document in known)
    for step in range(4):
        batch = rows[step]
        assert batch.ids.shape == (2, 128)
        assert batch.lengths.tolist() == [128, 128]
        assert batch.budget.slots == 64
        assert batch.borders is not None
        for row in range(2):
            mine = [border for border in batch.borders.tolist() if border[0] == row]
            assert mine[0][1] == 0
            assert mine[-1][2] == 128
            for (_, start, stop), following in zip(mine, [*mine[1:], None], strict=True):
                document = tuple(batch.ids[row, start:stop].tolist())
                if following is not None:
                    assert following[1] == stop
                    assert document in known
                else:
                    assert any(one[: len(document)] == document for one in known)


def test_a_row_follows_from_seed_step_and_place(jsonl: Path, tmp_path: Path) -> None:
    recipe = _recipe(jsonl)
    one, two = _rows(recipe, tmp_path), _rows(recipe, tmp_path)
    assert all(torch.equal(one[step].ids, two[step].ids) for step in (3, 0))
    assert not torch.equal(one[0].ids, one[1].ids)
    assert not torch.equal(one[0].ids, _rows(recipe, tmp_path, seed=1)[0].ids)
    assert one[0].borders is None


def test_held_back_documents_are_never_trained_on(jsonl: Path, tmp_path: Path) -> None:
    rows = _rows(_recipe(jsonl, reset=True), tmp_path)
    assert rows.training == 38
    held_back = {tuple(rows._document(index)) for index in (38, 39)}
    batch = rows.held_back(128, Fraction(1, 2), 4)
    assert batch.borders is not None
    for row, start, stop in batch.borders.tolist():
        found = tuple(batch.ids[row, start:stop].tolist())
        assert any(document[: len(found)] == found for document in held_back)
    trained = {token for step in range(6) for token in rows[step].ids.flatten().tolist()}
    assert not trained & {document[0] for document in held_back}


def test_every_kind_of_file_gives_the_same_rows(jsonl: Path, tmp_path: Path) -> None:
    texts = _texts()
    (tmp_path / "texts.json").write_text(json.dumps([{"text": text} for text in texts]))
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet")
    (tmp_path / "texts.txt").write_text("\n\n".join(texts))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_bytes(jsonl.read_bytes())
    wanted = _rows(_recipe(jsonl), tmp_path / "lock")[2].ids
    for name in ("texts.json", "texts.parquet", "texts.txt", "folder"):
        assert torch.equal(_rows(_recipe(tmp_path / name), tmp_path / f"lock {name}")[2].ids, wanted)


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "do 1 2"}, {"role": "assistant", "content": "answer 3"}]
    path.write_text(f"{json.dumps({'messages': messages})}\n" * 3)
    tokenizer = build_tokenizer()
    with pytest.raises(KvbenchError, match="holds messages, but the tokenizer has no chat template"):
        row_source(_recipe(path), tokenizer, Lock(tmp_path), 0)[0]
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
    rows = row_source(_recipe(path), tokenizer, Lock(tmp_path), 0)
    assert isinstance(rows, PackedRows)
    assert str(tokenizer.decode(rows._document(0))).split() == ["u", "do", "1", "2", "a", "answer", "3"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"path": ""}, "needs a path"),
        ({"path": "x.jsonl", "colum": "text"}, "did you mean 'column'"),
        ({"path": "x.jsonl", "reset": "yes"}, "'data.reset' cannot be 'yes': it is of type bool"),
        ({"path": "nowhere.jsonl"}, "There is no file or folder nowhere.jsonl"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path: Path, data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KvbenchError) as error:
        row_source(Recipe(data=data), build_tokenizer(), Lock(tmp_path), 0)
    assert sentence in str(error.value)


def test_a_column_that_is_not_there_and_documents_that_are_too_long(jsonl: Path, tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"Record \d+ of .*texts.jsonl has no column 'body' \(it has text\)"):
        _rows(_recipe(jsonl, column="body"), tmp_path)[0]
    with pytest.raises(KvbenchError, match=r"none has at most 5 tokens; raise data\.max_tokens"):
        _rows(_recipe(jsonl, max_tokens=5), tmp_path)[0]


def _policy(recipe: Recipe, name: str) -> LearnedPolicy:
    return build_policy(load_registry().policy(name), recipe.policy)


@pytest.mark.parametrize("reset", [False, True])
def test_a_training_on_packed_rows(
    make_tiny: Callable[[], LoadedModel], jsonl: Path, tmp_path: Path, reset: bool
) -> None:
    # A document of its own has to evict something too.
    recipe = replace(_recipe(jsonl, reset=reset), crs=("0.85",) if reset else ("0.5",))
    loaded, lock = make_tiny(), Lock(tmp_path / "out")
    rows = row_source(recipe, loaded.tokenizer, lock, 0)
    trainer = Trainer(loaded, _policy(recipe, "kvpop"), recipe, rows, tmp_path / "out")
    lock.write()
    checkpoint = trainer.train()
    assert checkpoint is not None
    assert checkpoint.trained_budgets["reference_lengths"] == {"128": 128}
    log = [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()]
    assert log[0]["boundary"] > 0
    assert log[0]["tokens"] == 256
    told = json.loads((tmp_path / "out" / LOCK).read_text())
    assert list(checkpoint.recipe["tasks"]) == [f"{key}@{revision}" for key, revision in told.items()]
    assert all(revision.startswith("sha256:") for revision in told.values())
    # Another content under the same name is another data set.
    jsonl.write_text(jsonl.read_text() + json.dumps({"text": "1 2 3"}) + "\n")
    with pytest.raises(KvbenchError, match="locks it to sha256:"):
        row_source(recipe, loaded.tokenizer, Lock(tmp_path / "out"), 0)
