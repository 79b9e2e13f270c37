"""Packed rows of token ids from a data set: documents end to end, cut where the row is full.

A row draws its documents by itself, from the seed, the step and its place: any number of processes can make any row, and
nothing has to be counted before the first. In exchange a long training may meet a document twice before it has met all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from kvbench.core.budget import Budget
from kvbench.core.dataset import Rows, Source
from kvbench.core.errors import KvbenchError, unknown_name
from kvbench.data.load import load
from kvbench.data.lock import Lock
from kvbench.train.data import Batch, RowSource
from kvbench.train.documents import aligned
from kvbench.train.recipe import Recipe

_LOCAL = (".json", ".jsonl", ".parquet", ".csv", ".txt")

_TRIES = 1000
"""Documents that may be too long in a row before the row gives up."""

_HELD_BACK_MOST = 512


@dataclass(frozen=True)
class DataSettings:
    """The `[data]` table of a recipe.

    Attributes:
        path: a file (.json, .jsonl, .parquet, .csv, .txt), a folder, or `owner/name` on the hub.
        config, split: of the data set.
        column: a list of messages, or text; empty for `messages` or else `text`.
        max_tokens: longer documents are passed over; 0 for the length of the row.
        reset: attention starts anew at every document.
    """

    path: str
    config: str = ""
    split: str = "train"
    column: str = ""
    max_tokens: int = 0
    reset: bool = False

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> DataSettings:
        """From TOML values.

        Raises:
            KvbenchError: a setting does not exist, or `path` is missing.
        """
        known = cls.__dataclass_fields__
        for name, value in table.items():
            if name not in known:
                raise unknown_name("recipe setting of data", name, known)
            kind = {"max_tokens": int, "reset": bool}.get(name, str)
            if type(value) is not kind:
                raise KvbenchError(
                    f"The recipe setting 'data.{name}' cannot be {value!r}: it is of type {kind.__name__}."
                )
        if not table.get("path"):
            raise KvbenchError("The recipe setting 'data' needs a path: a file, a folder or a data set on the hub.")
        return cls(**table)

    def read(self, lock: Lock) -> Rows:
        """The records, at the revision that the lock file has or will have.

        Raises:
            KvbenchError: they cannot be read, or are not what the lock file says.
        """
        source = Source(self.path, self.config or None, self.split)
        local = Path(self.path).exists() or self.path.endswith(_LOCAL)
        return load(source, self.path if local else None, lock, "--set data.path=PATH")


class PackedRows(RowSource):
    """Documents of a data set, packed.

    Args:
        records: of the data set.
        settings: how they become documents.
        tokenizer: of the model.
        recipe: its levels are lengths of rows.
        seed: of the run.

    Raises:
        KvbenchError: there are too few records to hold any back.
    """

    def __init__(self, records: Rows, settings: DataSettings, tokenizer: Any, recipe: Recipe, seed: int) -> None:
        super().__init__(recipe, seed)
        if len(records) < 2:
            raise KvbenchError(f"{records.name} has one record; training needs one, and evaluation another.")
        self.records = records
        self.settings = settings
        self.tokenizer = tokenizer
        # The last records are for evaluation only.
        self.training = len(records) - min(_HELD_BACK_MOST, max(1, len(records) // 20))

    def reference_length(self, level: int) -> int:
        """Length of the packed row."""
        return level

    def described(self) -> list[str]:
        """The data set with its revision."""
        settings = self.settings
        return [f"{Source(settings.path, settings.config or None, settings.split).key}@{self.records.revision}"]

    def _rows(self, level: int, cr: Fraction, rows: int, step: int | None, rng: random.Random) -> Batch:
        packed = [self._row(level, step, place) for place in range(rows)]
        ids = torch.zeros(rows, aligned(level), dtype=torch.int64)
        borders = []
        for place, documents in enumerate(packed):
            start = 0
            for document in documents:
                stop = min(level, start + len(document))
                ids[place, start:stop] = torch.tensor(document[: stop - start])
                borders.append((place, start, stop))
                start = stop
        return Batch(
            ids,
            torch.full((rows,), level),
            level,
            Budget.from_cr(cr, level),
            torch.arange(rows),
            torch.tensor(borders) if self.settings.reset else None,
        )

    def _row(self, level: int, step: int | None, place: int) -> list[list[int]]:
        """Documents that fill a row; the last of them may be longer than what is left."""
        rng = random.Random(f"{self.seed}/{'held back' if step is None else step}/{level}/{place}")
        records = range(self.training) if step is not None else range(self.training, len(self.records))
        most = self.settings.max_tokens or level
        documents: list[list[int]] = []
        filled = tries = 0
        while filled < level:
            document = self._document(rng.choice(records))
            tries += 1
            if 0 < len(document) <= most:
                documents.append(document)
                filled += len(document)
                tries = 0
            elif tries == _TRIES:
                raise KvbenchError(
                    f"Of {_TRIES} records of {self.records.name} drawn in a row, none has at most {most} tokens; "
                    "raise data.max_tokens, or the length of the rows."
                )
        return documents

    def _document(self, index: int) -> list[int]:
        """Token ids of a record: its messages through the chat template, or its text with an end."""
        record = self.records[index]
        column = self.settings.column or ("messages" if "messages" in record else "text")
        if column not in record:
            known = ", ".join(record)
            raise KvbenchError(
                f"Record {index + 1} of {self.records.name} has no column '{column}' (it has {known}); set data.column."
            )
        content = record[column]
        if isinstance(content, str):
            ids = list(self.tokenizer(content)["input_ids"])
            end = self.tokenizer.eos_token_id
            return ids if end is None or ids[-1:] == [end] else [*ids, end]
        if not getattr(self.tokenizer, "chat_template", None):
            raise KvbenchError(
                f"Column '{column}' of {self.records.name} holds messages, but the tokenizer has no chat template; "
                "set data.column to a column of text."
            )
        text = self.tokenizer.apply_chat_template(content, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
