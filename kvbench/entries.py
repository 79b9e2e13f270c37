"""What a plugin registers: frozen descriptions with lazy string targets. Nothing here imports torch."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvbench.core.errors import KvbenchError, unknown_name

Need = Literal["queries", "attention", "hidden", "future"]
"""What a policy asks of the engine: queries, attention weights, hidden states, or (oracles only) the future."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Parameter(NamedTuple):
    """One hyper-parameter as `kvbench describe` shows it; set with `--policy-arg name=value`."""

    name: str
    type: str
    default: str
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What policies, tasks and models have in common.

    Attributes:
        name: registered name: lower case, digits and `_`.
        target: `package.module:Class`, imported when the thing is first used and not before.
        summary: one line for `kvbench list`.
    """

    name: str
    target: str
    summary: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise KvbenchError(f"{self.name!r} is not a name; use lower-case letters, digits and '_', a letter first.")
        if not _TARGET.fullmatch(self.target):
            raise KvbenchError(f"{self.name!r} has the target {self.target!r}; write it as 'package.module:Class'.")

    def load(self) -> object:
        """Import the target and return it."""
        return load_target(self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry(Entry):
    """An eviction policy.

    Attributes:
        paper: where the method comes from, as a title or address; empty for a control.
        needs: signals that the policy asks of the engine.
        learned: it has a scorer or an adapted LM and therefore needs a checkpoint for the model.
        trainable: `kvbench train --policy NAME` knows it.
        runs_on: the policy whose checkpoints it runs on; empty for its own.
        prefill: `exact`: a prompt longer than the budget ends with exactly the slots that token-by-token feeding keeps.
            `chunked`: it is fed in chunks and rows say so.
        hard_budget: no step ever holds more slots than the budget. Policies without are never ranked as if bounded.
        positions: `original`: keys keep their position after eviction. `cache`: they are rotated to their place in
            the cache.
        parameters: hyper-parameters in the order of the class.
    """

    paper: str = ""
    needs: tuple[Need, ...] = ()
    learned: bool = False
    trainable: bool = False
    runs_on: str = ""
    prefill: Literal["exact", "chunked"] = "exact"
    hard_budget: bool = True
    positions: Literal["original", "cache"] = "original"
    parameters: tuple[Parameter, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry(Entry):
    """A source of problems with a grader.

    Attributes:
        held_out: no policy has been trained on this family; it is reported apart.
        paper: where the problems come from; empty for home-made ones.
        data: data set on the hub that the problems are read from; empty when they are generated.
        default: it runs when no task is named.
    """

    held_out: bool = False
    paper: str = ""
    data: str = ""
    default: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry(Entry):
    """A model source that has a name of its own.

    Attributes:
        licence: SPDX identifier of the weights.
    """

    licence: str


def load_target(target: str) -> object:
    """Import `package.module:Class` and return the class.

    Raises:
        KvbenchError: the module cannot be imported or has no such name; the sentence says which and why.
    """
    if not _TARGET.fullmatch(target):
        raise KvbenchError(f"{target!r} is not a target; write it as 'package.module:Class'.")
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise KvbenchError(f"Cannot import {module_name!r}, which holds the target {target!r}: {error}.") from error
    if attribute not in vars(module):
        raise unknown_name(f"class in {module_name}", attribute, (n for n in vars(module) if not n.startswith("_")))
    loaded: object = vars(module)[attribute]
    return loaded
