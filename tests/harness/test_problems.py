"""Prompts as the model sees them: plain, or a user's message through a chat template."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvbench.core.dataset import Record, Rows, Source
from kvbench.core.errors import KvbenchError
from kvbench.core.task import DatasetTask, Grade, Problem
from kvbench.harness.problems import PLAIN, ProblemSource
from kvbench.models.source import LoadedModel


class Sums(DatasetTask):
    name: ClassVar[str] = "sums"
    chat: ClassVar[bool] = True
    hub: ClassVar[Source] = Source("owner/sums")

    def parse(self, record: Record, index: int) -> Problem:
        return Problem(self.problem_id(index), str(self.value(record, index, "question", "problem")), "1")

    def grade(self, problem: Problem, completion: str) -> Grade:
        return Grade(0.0, None, True)


class Tokenizer:
    """One token a character; a beginning of its own unless it is told that the text has one."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def get_chat_template(self) -> str:
        assert self.chat_template is not None
        return self.chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt, self.chat_template is None) == (False, True, False)
        return f"<{messages[0]['role']}>{messages[0]['content']}{self.chat_template}"


ROWS = Rows([{"question": "a"}, {"problem": "bcd"}], "sums.jsonl", "sha256:1")


def source(loaded: LoadedModel, template: str | None, task: DatasetTask | None = None) -> ProblemSource:
    return ProblemSource(replace(loaded, tokenizer=Tokenizer(template)), {"sums": task or Sums(ROWS)})


def test_a_chat_template_renders_the_prompt_once(loaded: LoadedModel) -> None:
    made = source(loaded, "<bot>").get("sums", 8, 9, 0)
    assert made.texts == ("<user>a<bot>", "<user>bcd<bot>")
    assert made.prompts[0] == tuple(map(ord, "<user>a<bot>"))
    assert made.longest == len("<user>bcd<bot>")
    assert made.chat_template == hashlib.sha256(b"<bot>").hexdigest()
    assert [made.opening(index) for index in range(2)] == ["", ""]


def test_a_template_may_open_a_reasoning_block(loaded: LoadedModel) -> None:
    assert source(loaded, "<bot><think>\n").get("sums", 8, 1, 0).opening(0) == "<think>"


def test_without_a_template_the_prompt_is_plain(loaded: LoadedModel) -> None:
    made = source(loaded, None).get("sums", 8, 2, 0)
    assert made.texts == ("a", "bcd")
    assert made.prompts[0] == (1, ord("a"))
    assert made.chat_template == PLAIN


def test_another_template_is_another_prompt_hash(loaded: LoadedModel) -> None:
    hashes = {source(loaded, template).get("sums", 8, 2, 0).prompt_hash for template in (None, "<bot>", "<robot>")}
    assert len(hashes) == 3


def test_records_are_problems_in_their_order_whatever_the_seed(loaded: LoadedModel) -> None:
    problems = source(loaded, None)
    assert [problem.id for problem in problems.get("sums", 8, 9, 0).problems] == ["sums@1/0", "sums@1/1"]
    assert problems.get("sums", 8, 9, 0).problems == problems.get("sums", 99, 2, 7).problems
    assert problems.revision("sums") == "sha256:1"


def test_training_problems_are_refused() -> None:
    with pytest.raises(KvbenchError, match="is for evaluation only"):
        Sums(ROWS).problems(8, 1, seed=0, split="train")


@pytest.mark.parametrize("record", [{}, {"answer": 1}, {"question": None}])
def test_a_record_without_its_column_is_named(record: dict[str, Any]) -> None:
    task = Sums(Rows([{"question": "a"}, record], "sums.jsonl", "sha256:1"))
    with pytest.raises(KvbenchError, match=r"Row 2 of sums\.jsonl has no value in column 'question' or 'problem'"):
        task.problems(8, 2, seed=0)
