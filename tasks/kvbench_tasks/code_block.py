"""The program that a completion gives: text only."""

from __future__ import annotations

import re
from textwrap import dedent

_FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*([^\s`]*)[^`]*")
_PYTHON = {"python", "python3", "py", "py3"}


def last_code_block(text: str) -> str | None:
    """Return the last closed block marked as Python; if none is, the last closed block without a mark.

    A block begins with a line of three or more backticks or tildes and ends with a line of at least as many. What is cut
    off before its end is not a program.
    """
    marked = unmarked = None
    fence, language, lines = "", "", list[str]()
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        if not fence:
            if match is not None:
                fence, language, lines = match[1], match[2].lower(), []
        elif match is not None and not match[2] and match[1].startswith(fence):
            if language in _PYTHON:
                marked = dedent("\n".join(lines))
            elif not language:
                unmarked = dedent("\n".join(lines))
            fence = ""
        else:
            lines.append(line)
    return unmarked if marked is None else marked
