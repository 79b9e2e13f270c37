from __future__ import annotations

import pytest

from kvbench.core.errors import canonical, unknown_name


def test_near_misses_are_offered() -> None:
    assert str(unknown_name("policy", "tovaa", ["tova", "tova_head", "full"])) == (
        "There is no policy named 'tovaa'; did you mean 'tova' or 'tova_head'?"
    )


@pytest.mark.parametrize("name", ["Streaming-LLM", "streaming-lm", "STREAMING_LLM"])
def test_case_and_dashes_do_not_hide_a_near_miss(name: str) -> None:
    assert "did you mean 'streaming_llm'?" in str(unknown_name("policy", name, ["streaming_llm", "full"]))


def test_without_a_near_miss_every_name_is_listed_in_order() -> None:
    assert str(unknown_name("task", "zzz", ["b", "a"])) == "There is no task named 'zzz'; known: a, b."


def test_nothing_registered() -> None:
    assert str(unknown_name("model", "m", [])) == "There is no model named 'm'; no model is registered."


def test_canonical_takes_dashes() -> None:
    assert canonical(" streaming-llm ") == "streaming_llm"
