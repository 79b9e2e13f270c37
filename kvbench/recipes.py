"""Find a suite or a training recipe: a TOML file that ships with kvbench, or anybody's own by path."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

from kvbench.core.errors import KvbenchError, canonical, unknown_name

Kind = Literal["suites", "train"]

_SINGULAR = {"suites": "suite", "train": "training recipe"}


def folder(kind: Kind) -> Path:
    """Return the folder of the recipes that ship with kvbench."""
    # A wheel is unpacked when it is installed, so the resource is a real folder.
    return Path(str(files("kvbench_recipes"))) / kind


def names(kind: Kind) -> list[str]:
    """Return the names of the recipes that ship with kvbench."""
    return sorted(path.stem for path in folder(kind).glob("*.toml"))


def find(name_or_path: str | Path, kind: Kind) -> Path:
    """Return the file of a recipe given by name (`reference-v1`) or by path (`my/suite.toml`).

    Raises:
        KvbenchError: there is no such recipe; the sentence lists near misses.
    """
    text = str(name_or_path)
    path = Path(text)
    if path.suffix == ".toml" or len(path.parts) > 1:
        if not path.is_file():
            known = ", ".join(names(kind))
            raise KvbenchError(f"There is no {_SINGULAR[kind]} file {text}; give a TOML file or one of: {known}.")
        return path
    by_name = {canonical(name): name for name in names(kind)}
    if canonical(text) not in by_name:
        raise unknown_name(_SINGULAR[kind], text, names(kind))
    return folder(kind) / f"{by_name[canonical(text)]}.toml"
