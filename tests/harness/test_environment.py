from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbench.harness.environment import Commit, commit, environment


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    commit.cache_clear()
    yield
    commit.cache_clear()


@pytest.mark.parametrize(("text", "expected"), [("abc", Commit("abc", False)), ("abc-dirty", Commit("abc", True))])
def test_the_commit_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, expected: Commit) -> None:
    monkeypatch.setenv("KVBENCH_COMMIT", text)
    assert commit() == expected


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert commit() == Commit(None, None)


def test_versions_and_machine() -> None:
    found = environment("cpu")
    assert found.torch.startswith("2.")
    assert found.threads >= 1
    assert found.device_name
