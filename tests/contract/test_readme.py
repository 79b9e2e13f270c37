"""The commands that a newcomer copies."""

from __future__ import annotations

import re
from pathlib import Path

from kvbench.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def command(marker: str) -> str:
    (line,) = re.findall(rf"<!-- {marker} -->\n```\n(.*)\n```\n", README)
    return str(line)


def test_the_two_commands_are_single_lines_that_install_torch_first() -> None:
    assert command("main command").endswith("&& pip install . && kvbench run --policy kvpop --cr 0.88")
    assert command("test command").endswith('&& pip install ".[test]" && pytest')
    for marker in ("main command", "test command"):
        assert command(marker).startswith("pip install torch==2.13.0 && ")


def test_every_command_that_it_shows_exists() -> None:
    shown = set(re.findall(r"(?:^|&& |`)kvbench (\w+)", README, flags=re.MULTILINE))
    assert shown
    assert shown <= {name for name, _ in COMMANDS}
