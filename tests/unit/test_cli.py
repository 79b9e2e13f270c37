from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvbench.cli import main as cli
from kvbench.core.errors import KvbenchError
from kvbench.plugins import load_registry

Add = Callable[[Callable[[], None]], None]


@pytest.fixture
def add_command(monkeypatch: pytest.MonkeyPatch) -> Add:
    """Add a command named `planted`."""

    def add(function: Callable[[], None]) -> None:
        monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, ("planted", function)))

    return add


def raiser(error: BaseException) -> Callable[[], None]:
    def planted() -> None:
        """Fails."""
        raise error

    return planted


def test_list_shows_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    registry = load_registry()
    for name in [*registry.policies, *registry.tasks, *registry.models]:
        assert name in out


def test_list_as_json_is_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == ["policies", "tasks", "models"]
    assert [policy["name"] for policy in listed["policies"]] == list(load_registry().policies)
    assert listed["tasks"][0]["distribution"] == "kvbench"


def test_list_can_be_narrowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "models", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["models"]


def test_describe_takes_dashes_and_shows_capabilities(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["describe", "tova-head"]) == 0
    out = capsys.readouterr().out
    assert "attention weights" in out
    assert "chunked" in out


@pytest.mark.parametrize("name", ["kvpop", "ledger", "ref"])
def test_describe_as_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["describe", name, "--json"]) == 0
    (described,) = json.loads(capsys.readouterr().out)
    assert described["name"] == name


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["describe", "tovaa"], "There is no policy, task or model named 'tovaa'; did you mean 'tova' or 'tova_head'?"),
        (["list", "polices"], "There is no list named 'polices'; did you mean 'policies'?"),
    ],
)
def test_a_misspelt_name_is_one_sentence_and_exit_code_2(
    line: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {sentence}\n"
    assert captured.out == ""


@pytest.mark.parametrize("line", [["nix"], ["list", "--nix"], ["describe"], ["list", "tasks", "more"], ["--nix"]])
def test_a_wrong_command_line_is_exit_code_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("line", [[], ["--help"], ["-h"], ["list", "--help"], ["--version"]])
def test_help_and_version_are_exit_code_0(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 0
    assert "kvbench" in capsys.readouterr().out


def test_debug_shows_the_traceback_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["--debug", "describe", "nix"], ["describe", "nix", "--debug"]):
        assert cli.main(line) == 2
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert "error: There is no" in err


def test_debug_after_two_dashes_belongs_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["describe", "--", "--debug"]) == 2
    assert "named '--debug'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KvbenchError("The thing is wrong."), 2, "error: The thing is wrong.\n"),
        (ValueError("oops"), 1, "error: ValueError: oops (this is a bug; --debug shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_errors_end(
    error: BaseException, code: int, message: str, add_command: Add, capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(raiser(error))
    assert cli.main(["planted"]) == code
    assert capsys.readouterr().err == message


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, function in cli.COMMANDS:
        assert function.__doc__, name
        assert cli.main([name, "--help"]) == 0
    capsys.readouterr()
