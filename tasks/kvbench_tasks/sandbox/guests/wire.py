"""Python values as JSON, in the boxes: a list or scalar is itself, everything else an object of one key."""

from typing import Any


class Strange:
    """A value that cannot leave its box; equal to nothing but itself."""


def encode(value: Any) -> Any:
    """Plain data as JSON; anything else as something that equals nothing."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    for name, kinds in (("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, kinds):
            return {name: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    return {"strange": type(value).__name__}


def decode(value: Any) -> Any:
    """What `encode` made; raises ValueError or TypeError for anything else."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, items),) = value.items()
    if name == "strange":
        return Strange()
    if name == "dict":
        return {decode(key): decode(item) for key, item in items}
    return {"tuple": tuple, "set": set}[name](decode(item) for item in items)
