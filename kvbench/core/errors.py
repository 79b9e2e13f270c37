"""The one exception that reaches a user, and the sentence for a misspelt name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KvbenchError(Exception):
    """What a user did wrong or has to repair, as one plain sentence.

    The sentence names the thing, says what was found and what would do. The command line prints it without a traceback
    and exits with code 2.
    """


def canonical(name: str) -> str:
    """Return `name` as it is registered: `-` on the command line stands for `_`."""
    return name.strip().replace("-", "_")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> KvbenchError:
    """Build the error for a name that is not registered, with near misses or else every known name.

    Args:
        kind: what was asked for, in the singular: `policy`, `task`, `suite`.
        name: the name as the user wrote it.
        known: the names that would have done.
    """
    names = sorted(set(known))
    near = get_close_matches(canonical(name).lower(), names, n=3, cutoff=0.6)
    if near:
        advice = f"did you mean {_either(near)}?"
    elif names:
        advice = f"known: {', '.join(names)}."
    else:
        advice = f"no {kind} is registered."
    return KvbenchError(f"There is no {kind} named {name!r}; {advice}")


def _either(names: list[str]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
