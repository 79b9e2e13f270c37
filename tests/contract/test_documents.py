"""What documents and docstrings point at exists, and the examples in documents are files that the tests run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvbench.core.result import Environment, Result

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path for folder in (".", "docs", "docs/decisions", "policies", "tasks") for path in (ROOT / folder).glob("*.md")
)
SOURCES = sorted(
    path for folder in ("kvbench", "policies", "tasks", "recipes", "tests") for path in (ROOT / folder).rglob("*.py")
)


def test_the_examples_are_the_files_that_they_name() -> None:
    named = set()
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for path, block in re.findall(r"<!-- (tests/\S+) -->\n```\w+\n(.*?)\n```", text, flags=re.DOTALL):
            assert block + "\n" == (ROOT / path).read_text(encoding="utf-8"), f"{document.name}: {path}"
            named.add(path)
    assert len(named) >= 4


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_point_at_files_that_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [path for path in linked if not (document.parent / path).exists()] == []
    mentioned = re.findall(
        r"(?<![\w/])((?:docs|kvbench|policies|tasks|recipes|tests)/[\w/.-]*\w\.(?:md|py|toml))", text
    )
    # NAME, MODEL and the like stand for something.
    assert [path for path in mentioned if not (ROOT / path).exists() and not re.search(r"[A-Z]{4}", path)] == []


def test_the_sections_that_docstrings_cite_exist() -> None:
    sections = set(re.findall(r"^#+ ([\d.]+?)\.? ", (ROOT / "docs" / "kvpop.md").read_text(encoding="utf-8"), re.M))
    cited: dict[str, str] = {}
    for source in SOURCES:
        for line in re.findall(r"kvpop\.md((?:(?:,| to| and)? ?\d+(?:\.\d+)?)+)", source.read_text(encoding="utf-8")):
            cited |= dict.fromkeys(re.findall(r"\d+(?:\.\d+)?", line), source.name)
    assert cited
    assert {number: source for number, source in cited.items() if number not in sections} == {}


def test_every_field_of_a_row_is_explained() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").partition("## Every field of a row")[2]
    explained = {name for cell in re.findall(r"^\| (`.*?`) \|", text, re.M) for name in re.findall(r"`(\w+)`", cell)}
    fields = {field.name for row in (Result, Environment) for field in dataclasses.fields(row)}
    assert explained == fields - {"environment"}
