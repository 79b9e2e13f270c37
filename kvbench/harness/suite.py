"""Suites: the arguments of a run in a TOML file, so that a published table can name how it was made."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvbench.core.errors import KvbenchError, unknown_name
from kvbench.recipes import find


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The keys that a suite may have; None and () leave the choice to the command line and its defaults.

    Attributes:
        description: one sentence for people.
        policies, tasks: names.
        leave_out_untrained: learned policies that have no checkpoint for the model are left out, not an error.
        checkpoints: folders of learned policies, as seen from the suite's folder.
        crs: ratios as text; or `budgets`: slots.
        gen_lens: generation caps.
        model: default model.
        limit: problems a task.
        samples: completions a problem.
        seeds: one row each.
        reference_length: tokens that the dense cache is taken to hold.
        dense_adapted: also run the dense model on each LM that a policy brings.
        temperature, top_p, top_k: of sampling.
        lengths: (task, generation cap): instead of `gen_lens` for that task.
        data: (task, local copy of its data set); paths as seen from the suite's folder.
    """

    description: str = ""
    policies: tuple[str, ...] = ()
    leave_out_untrained: bool | None = None
    checkpoints: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    crs: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()
    gen_lens: tuple[int, ...] = ()
    model: str | None = None
    limit: int | None = None
    samples: int | None = None
    seeds: tuple[int, ...] = ()
    reference_length: int | None = None
    dense_adapted: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    lengths: tuple[tuple[str, int], ...] = ()
    data: tuple[tuple[str, str], ...] = ()


_SCALARS: dict[str, tuple[type, ...]] = {
    "description": (str,),
    "model": (str,),
    "limit": (int,),
    "samples": (int,),
    "reference_length": (int,),
    "dense_adapted": (bool,),
    "leave_out_untrained": (bool,),
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
}
_LISTS: dict[str, type] = {
    "policies": str,
    "checkpoints": str,
    "tasks": str,
    "crs": str,
    "budgets": int,
    "gen_lens": int,
    "seeds": int,
}
_TABLES: dict[str, type] = {"data": str, "lengths": int}


def load_suite(name: str) -> Suite:
    """Read a suite that ships with kvbench, by name, or any TOML file, by path.

    Raises:
        KvbenchError: there is none, it is not TOML, or a key or a value is not a suite's.
    """
    path = find(name, "suites")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KvbenchError(f"The suite {path} is not TOML: {error}.") from error
    for key, value in values.items():
        if key not in _SCALARS and key not in _LISTS and key not in _TABLES:
            raise unknown_name(f"key of a suite ({path})", key, (field.name for field in fields(Suite)))
        if not _fits(key, value):
            raise KvbenchError(f"The suite {path} has {key} = {value!r}; it has to be {_wanted(key)}.")
    if values.get("crs") and values.get("budgets"):
        raise KvbenchError(f"The suite {path} has both crs and budgets; keep one.")
    arguments: dict[str, Any] = {key: _frozen(key, value, path.parent) for key, value in values.items()}
    return Suite(**arguments)


def _frozen(key: str, value: Any, folder: Path) -> Any:
    if key in _TABLES:
        return tuple((task, item if key == "lengths" else str(folder / item)) for task, item in value.items())
    if key == "checkpoints":
        return tuple(str(folder / where) for where in value)
    return tuple(value) if key in _LISTS else value


def _wanted(key: str) -> str:
    if key in _TABLES:
        return f"a table of {_TABLES[key].__name__}"
    return f"a list of {_LISTS[key].__name__}" if key in _LISTS else f"of type {_SCALARS[key][-1].__name__}"


def _fits(key: str, value: Any) -> bool:
    if key in _TABLES:
        return isinstance(value, dict) and all(type(item) is _TABLES[key] for item in value.values())
    if key in _LISTS:
        return isinstance(value, list) and all(type(item) is _LISTS[key] for item in value)
    return type(value) in _SCALARS[key]
