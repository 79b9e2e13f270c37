from __future__ import annotations

import pytest

from kvbench.core.errors import KvbenchError
from kvbench_tasks.longtext import LongText, documents


def test_twenty_different_documents_in_plain_ascii() -> None:
    texts = [document.text for document in documents()]
    assert len({document.title for document in documents()}) == len(set(texts)) == 20
    assert all(text.isascii() and 18_000 < len(text) < 20_000 for text in texts)
    assert sum(map(len, texts)) < 400_000
    assert not any(word in text.lower() for text in texts for word in ("gutenberg", "copyright", "etext"))


def test_problem_i_is_document_i_whatever_the_seed() -> None:
    task = LongText()
    assert [p.prompt for p in task.problems(100, 3, 0)] == [document.text for document in documents()[:3]]
    assert task.problems(100, 50, 7) == task.problems(2000, 20, 0)
    assert (task.new_tokens(2048), task.longest_prompt(2048)) == (0, 2048)


def test_it_is_for_evaluation_and_there_is_nothing_to_grade() -> None:
    with pytest.raises(KvbenchError, match="evaluation only"):
        LongText().problems(100, 1, 0, "train")
    with pytest.raises(KvbenchError, match="no completions"):
        LongText().grade(LongText().problems(100, 1, 0)[0], "text")
