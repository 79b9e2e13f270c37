"""Long documents, scored token by token: public-domain plays, poems and prose of the 17th century."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import ClassVar, NamedTuple

from kvbench.core.errors import KvbenchError
from kvbench.core.task import Problem, ScoringTask, Split


class Document(NamedTuple):
    """One excerpt; data/README.md says where it comes from."""

    title: str
    author: str
    text: str


@cache
def documents() -> tuple[Document, ...]:
    """Return the documents that ship with kvbench."""
    lines = (files("kvbench_tasks") / "data" / "longtext.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Document(**json.loads(line)) for line in lines)


class LongText(ScoringTask):
    """Twenty documents of about 19 kB, the same whatever the seed."""

    name: ClassVar[str] = "longtext"

    def problems(self, gen_len: int, n: int, seed: int, split: Split = "eval") -> list[Problem]:
        if split == "train":
            raise KvbenchError("Task 'longtext' is for evaluation only; train on another task.")
        return [Problem(f"longtext@{self.version}/{document.title}", document.text, "") for document in documents()[:n]]
