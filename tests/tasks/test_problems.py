"""What every reference task promises about its problems."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest

from kvbench.core.errors import KvbenchError
from kvbench_tasks.reference_task import LEVELS, ReferenceTask, read_count
from kvbench_tasks.vocabulary import SPECIAL_WORDS, VOCABULARY, build_tokenizer
from tests.tasks.families import FAMILIES, PROBLEMS, read_solution

BY_NAME = pytest.mark.parametrize("task", FAMILIES, ids=lambda task: task.name)
BY_LEVEL = pytest.mark.parametrize("level", LEVELS)

FROZEN = "34478fbbf214e52f0633208c0bd0421997d15315c862224560aff77f9d9bcdf4"
"""SHA-256 of version 1: the first ten evaluation problems of every family and level."""


@BY_NAME
@BY_LEVEL
def test_interpreter_and_trace_writer_agree(task: ReferenceTask, level: int) -> None:
    for seed, split in ((0, "eval"), (77, "train")):
        for problem in task.problems(level, PROBLEMS[level], seed, split):  # type: ignore[arg-type]  # a literal
            trace = task.trace(problem)
            completion = trace.tokens[trace.prompt_len :]
            assert " ".join(trace.tokens[: trace.prompt_len]) == problem.prompt
            assert read_solution(completion) == task.interpret(problem.prompt)
            assert problem.answer == task.interpret(problem.prompt)[1]
            assert completion.count("#") == task.size(level).steps
            assert len(completion) <= level
            assert trace.prompt_len == task.longest_prompt(level)
            assert set(trace.tokens) <= set(VOCABULARY)


@BY_NAME
def test_the_completions_of_a_level_have_one_length(task: ReferenceTask) -> None:
    for level in LEVELS:
        assert len({len(task.trace(problem).tokens) for problem in task.problems(level, 10, seed=1)}) == 1


@BY_NAME
@BY_LEVEL
def test_problems_depend_on_task_split_level_seed_and_number_only(task: ReferenceTask, level: int) -> None:
    problems = task.problems(level, 12, seed=5)
    assert problems == type(task)().problems(level, 12, seed=5)
    assert problems[:7] == task.problems(level, 7, seed=5)
    assert problems[9] == task.problem(level, 9, seed=5)
    assert len({problem.id for problem in problems}) == 12
    others = [task.problems(level, 12, seed=6), task.problems(level, 12, seed=5, split="train")]
    assert not {problem.id for problem in problems} & {problem.id for other in others for problem in other}
    assert problems[0].id == f"{task.name}@1/{level}/seed5/0"


@BY_NAME
@BY_LEVEL
def test_no_problem_is_in_both_splits(task: ReferenceTask, level: int) -> None:
    count = 150 if level <= 512 else 20
    prompts = {
        split: {problem.prompt for seed in range(3) for problem in task.problems(level, count, seed, split)}
        for split in ("eval", "train")
    }
    assert not prompts["eval"] & prompts["train"]
    # Nearly all are different: a level does not run out of problems.
    assert all(len(texts) > 2.9 * count for texts in prompts.values())


def test_the_problems_are_those_that_were_frozen() -> None:
    """Change a version with its problems, and this digest with the version."""
    assert {task.version for task in FAMILIES} == {1}
    digest = hashlib.sha256()
    for task in FAMILIES:
        for level in LEVELS:
            for problem in task.problems(level, 10, seed=0):
                digest.update(json.dumps([problem.id, problem.prompt, problem.answer]).encode())
    assert digest.hexdigest() == FROZEN


def test_another_process_draws_the_same_problems() -> None:
    code = (
        "from kvbench_tasks.codebook import Codebook\n"
        "print(*(problem.prompt for problem in Codebook().problems(512, 5, seed=9)), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    task = next(task for task in FAMILIES if task.name == "codebook")
    assert run.stdout.splitlines() == [problem.prompt for problem in task.problems(512, 5, seed=9)]


@BY_NAME
def test_other_levels_are_refused(task: ReferenceTask) -> None:
    with pytest.raises(
        KvbenchError, match=f"Task '{task.name}' has no problems of generation length 300; choose from 128,"
    ):
        task.problems(300, 1, seed=0)


def test_a_prompt_of_something_else_is_refused() -> None:
    with pytest.raises(KvbenchError, match="not the prompt of a reference task: 'once upon a time'"):
        read_count("once upon a time")


def test_one_family_is_held_out() -> None:
    assert [task.name for task in FAMILIES if task.held_out] == ["ledger"]


def test_the_vocabulary_is_small_and_every_word_is_used() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) <= 64
    used = {
        word for task in FAMILIES for level in LEVELS for problem in task.problems(level, 4, seed=0)
        for word in task.trace(problem).tokens
    }  # fmt: skip
    # 26 names exist; the largest problem uses 25.
    assert set(VOCABULARY) - used == {*SPECIAL_WORDS, "z"} - {"<bos>", "<eos>"}


def test_one_word_is_one_token() -> None:
    tokenizer = build_tokenizer()
    for task in FAMILIES:
        trace = task.trace(task.problem(512, 0, seed=0))
        ids = tokenizer(" ".join(trace.tokens))["input_ids"]
        assert ids == [VOCABULARY.index(word) for word in trace.tokens]
        assert tokenizer.decode(ids) == " ".join(trace.tokens)
