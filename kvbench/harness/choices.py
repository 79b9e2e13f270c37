"""From names on the command line to policies that can run: hyper-parameters, checkpoints, adapted LMs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

from kvbench.core.errors import KvbenchError, unknown_name
from kvbench.core.policy import LearnedPolicy, Policy
from kvbench.entries import PolicyEntry
from kvbench.harness.options import Checked
from kvbench.models.checkpoint import Checkpoint, checkpoint_of, find_checkpoint
from kvbench.plugins import Registry

if TYPE_CHECKING:
    from kvbench.models.source import LoadedModel

_TRUE = frozenset({"true", "yes", "1"})
_FALSE = frozenset({"false", "no", "0"})


@dataclass(frozen=True)
class Choice:
    """One policy as it will run.

    Attributes:
        policy: its hyper-parameters.
        args: those that were given by hand.
        checkpoint: its trained weights.
        adapted: the checkpoint whose LM replaces the model's own; usually the policy's own checkpoint.
    """

    policy: Policy
    args: tuple[tuple[str, str], ...] = ()
    checkpoint: Checkpoint | None = None
    adapted: Checkpoint | None = None


@dataclass(frozen=True)
class Choices:
    """What will run, and what was left out of `--policy all`, one sentence each."""

    policies: tuple[Choice, ...]
    dense: Choice
    left_out: tuple[str, ...] = ()


def choose(checked: Checked, loaded: LoadedModel, registry: Registry) -> Choices:
    """Make every policy, with its checkpoint when it is learned.

    Raises:
        KvbenchError: a hyper-parameter or a checkpoint does not fit.
    """
    given = _given_checkpoints(checked, loaded)
    adapted = _load(checked.adapted_lm, loaded) if checked.adapted_lm is not None else None
    if adapted is not None and adapted.lm_weights is None:
        raise KvbenchError(f"The checkpoint {checked.adapted_lm} holds no adapted LM, so --adapted-lm cannot use it.")
    taken: set[str] = set()
    policies: list[Choice] = []
    left_out: list[str] = []
    for name in checked.policies:
        entry = registry.policy(name)
        if entry.learned:
            try:
                checkpoint = given.get(checkpoint_of(name)) or _load(find_checkpoint(name, loaded.name), loaded, name)
            except KvbenchError as error:
                if not checked.everything:
                    raise
                left_out.append(str(error))
                continue
            own = checkpoint if checkpoint.lm_weights is not None else None
            policies.append(Choice(checkpoint.policy(name), checkpoint=checkpoint, adapted=adapted or own))
        else:
            policy, args = make_policy(entry, checked.policy_args)
            taken.update(argument for argument, _ in args)
            policies.append(Choice(policy, args, adapted=adapted))
    _refuse_unused(checked, policies, taken)
    full, _ = make_policy(registry.policy("full"), ())
    return Choices(tuple(policies), Choice(full), tuple(left_out))


def make_policy(entry: PolicyEntry, arguments: Sequence[tuple[str, str]]) -> tuple[Policy, tuple[tuple[str, str], ...]]:
    """A policy with those of the arguments that it has, and these arguments; a learned one without its trained weights.

    Raises:
        KvbenchError: a value is not of the parameter's type, or the policy refuses it.
    """
    made = entry.load()
    if not (isinstance(made, type) and issubclass(made, Policy)):
        raise KvbenchError(
            f"Policy '{entry.name}' points at {entry.target}, which is not a kvbench.core.policy.Policy."
        )
    types = get_type_hints(made)
    parameters = {field.name: types[field.name] for field in dataclasses.fields(made)}
    fitting = tuple((name, value) for name, value in arguments if name in parameters)
    values = {name: _convert(entry.name, name, value, parameters[name]) for name, value in fitting}
    return made(**values), fitting


def _convert(policy: str, name: str, text: str, kind: object) -> object:
    try:
        if kind is bool and text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        if kind is int or kind is float:
            return kind(text)
        if kind is str or (get_origin(kind) is Literal and text in get_args(kind)):
            return text
    except ValueError:
        pass
    named = kind.__name__ if isinstance(kind, type) else str(kind)
    wanted = ", ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else named
    raise KvbenchError(f"The argument {name}={text} of policy '{policy}' is not of type {wanted}.")


def _given_checkpoints(checked: Checked, loaded: LoadedModel) -> dict[str, Checkpoint]:
    found: dict[str, Checkpoint] = {}
    for folder in checked.checkpoints:
        name = Checkpoint.load(folder).policy_name
        if name in found:
            raise KvbenchError(f"Two checkpoints of policy '{name}' were given; run them one by one.")
        if name not in map(checkpoint_of, checked.policies):
            raise KvbenchError(f"A checkpoint of policy '{name}' was given, but it does not run; add --policy {name}.")
        found[name] = _load(folder, loaded)
    return found


def _load(folder: Path, loaded: LoadedModel, policy: str | None = None) -> Checkpoint:
    """Read a checkpoint and refuse it unless it is for this model (and policy), weights included."""
    checkpoint = Checkpoint.load(folder)
    checkpoint.require(loaded, policy)
    # Shapes are checked now rather than in the middle of a grid.
    checkpoint.scorers(loaded.geometry)
    with checkpoint.adapted(loaded.model):
        pass
    return checkpoint


def _refuse_unused(checked: Checked, policies: Sequence[Choice], taken: set[str]) -> None:
    """A hyper-parameter that was asked for and would silently do nothing is an error."""
    for name, _ in checked.policy_args:
        if name in taken:
            continue
        fixed = [
            c.policy.name for c in policies if name in _parameters(c.policy) and isinstance(c.policy, LearnedPolicy)
        ]
        if fixed:
            raise KvbenchError(
                f"The argument '{name}' of policy '{fixed[0]}' is fixed by its checkpoint; train another one."
            )
        known = (parameter for choice in policies for parameter in _parameters(choice.policy))
        raise unknown_name("policy argument", name, known)


def _parameters(policy: Policy) -> list[str]:
    return [field.name for field in dataclasses.fields(policy)]
