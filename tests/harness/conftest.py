"""Doubles: cells, a model without weights, a task that needs no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from kvbench.core.cell import Cell
from kvbench.core.policy import Geometry
from kvbench.core.task import Grade, Problem, Split, Task
from kvbench.harness.store import Settings
from kvbench.models.source import LoadedModel

CELL = Cell(
    model="tiny",
    weights_hash="w" * 64,
    policy="random",
    task="words",
    task_version=1,
    gen_length=8,
    slots=4,
    cr="0.5",
    reference_length=8,
    problems=4,
    samples=1,
    seed=0,
    dtype="float32",
    device="cpu",
    rows=4,
)


class Words(Task):
    """The answer is the problem's number, as a word."""

    name: ClassVar[str] = "words"
    levels: ClassVar[tuple[int, ...]] = (8, 16)

    def problems(self, gen_len: int, n: int, seed: int, split: Split = "eval") -> list[Problem]:
        return [Problem(f"words/{gen_len}/{split}/{seed}/{i}", f"say {i}", str(i)) for i in range(n)]

    def longest_prompt(self, gen_len: int) -> int:
        return 3

    def grade(self, problem: Problem, completion: str) -> Grade:
        right = completion.split()[:1] == [problem.answer]
        return Grade(float(right), float(right), True)


class Held(Words):
    name: ClassVar[str] = "held"
    held_out: ClassVar[bool] = True


class NumberTokenizer:
    """One token a word: a number is itself plus 10, everything else is 1."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) + 10 if word.isdecimal() else 1 for word in text.split()]}

    def decode(self, tokens: list[int], **_: object) -> str:
        return " ".join(str(token - 10) for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {"say": 1}


@pytest.fixture
def cell() -> Callable[..., Cell]:
    def make(**changes: object) -> Cell:
        return replace(CELL, **changes)  # type: ignore[arg-type]  # any field of a cell

    return make


@pytest.fixture
def tasks() -> dict[str, Task]:
    return {"words": Words(), "held": Held()}


@pytest.fixture
def loaded() -> LoadedModel:
    return LoadedModel(
        name="tiny",
        model=torch.nn.Linear(1, 1),
        tokenizer=NumberTokenizer(),
        geometry=Geometry(2, 4, 2, 8),
        weights_hash="w" * 64,
        random=False,
        eos=frozenset({2}),
        max_positions=64,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.fixture
def settings() -> Settings:
    return Settings(
        model="tiny",
        weights_hash="w" * 64,
        problems=4,
        samples=1,
        seeds=(0,),
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        dtype="float32",
        device="cpu",
        rows=4,
        attention="auto",
        measurement=1,
        schema=1,
    )
