"""docs/hooks.md and kvbench/hookspecs.py say the same."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kvbench import hookspecs
from kvbench.plugins import HOOKS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()


def specified() -> dict[str, str]:
    """Hook -> its signature, as the heading in the document writes it."""
    functions = inspect.getmembers(hookspecs, inspect.isfunction)
    return {name: f"{name}{inspect.signature(function)}".replace("'", "") for name, function in functions}


def test_every_hook_has_a_heading_with_its_signature() -> None:
    headings = re.findall(r"^## `(.*)`$", DOCUMENT, flags=re.MULTILINE)
    assert sorted(headings) == sorted(specified().values())


def test_every_hook_is_collected_exported_prefixed_and_documented() -> None:
    names = set(specified())
    assert names == set(HOOKS)
    assert names <= set(hookspecs.__all__)
    for name in names:
        assert name.startswith("kvbench_")
        assert getattr(hookspecs, name).__doc__


def test_the_document_names_no_hook_that_does_not_exist() -> None:
    assert set(re.findall(r"kvbench_(?:policies|tasks|models)\b|kvbench_\w+(?=\()", DOCUMENT)) <= set(specified())


def test_the_entry_fields_in_the_document_exist() -> None:
    from kvbench import entries

    for table in re.findall(r"^Fields of `(\w+)`: (.*)$", DOCUMENT, flags=re.MULTILINE):
        name, listed = table
        assert re.findall(r"`(\w+)`", listed) == list(getattr(entries, name).__dataclass_fields__)
