"""The state of an unfinished training: one safetensors file, from which a killed run goes on.

No random state is kept: rows, budgets and sampled queries of a step follow from the seed and the step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvbench.core.errors import KvbenchError
from kvbench.models.checkpoint import write_atomically

STATE = "resume.safetensors"
CONFIGURATION = "train.json"
LOG = "log.jsonl"

_UNFINISHED = f".{STATE}.tmp"


def open_folder(out: Path, configuration: Mapping[str, Any], *, resume: bool, leftovers: tuple[str, ...] = ()) -> None:
    """Makes `out` the folder of one configuration.

    Args:
        out: the folder; made if it does not exist.
        configuration: everything that the result depends on, JSON values.
        resume: go on with what is there; otherwise start afresh.
        leftovers: further files of an earlier run that a fresh start removes.

    Raises:
        KvbenchError: the folder belongs to something else, or cannot be written.
    """
    wanted = json.loads(json.dumps(configuration))
    path = out / CONFIGURATION
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Left by a kill in the middle of a write.
        (out / _UNFINISHED).unlink(missing_ok=True)
        if not resume:
            for name in (STATE, CONFIGURATION, LOG, *leftovers):
                (out / name).unlink(missing_ok=True)
        if not path.exists():
            if any(out.iterdir()):
                raise KvbenchError(f"The folder {out} is not empty and holds no training; choose another --out.")
            write_atomically(path, (json.dumps(wanted, indent=2) + "\n").encode())
    except OSError as error:
        raise KvbenchError(f"Cannot write to the folder {out}: {error.strerror}.") from error
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KvbenchError(f"{path} is damaged; choose another --out or start afresh with --no-resume.") from error
    if found != wanted:
        raise KvbenchError(
            f"The folder {out} holds a training with another configuration ({_difference(found, wanted)}); "
            "choose another --out or start afresh with --no-resume."
        )


class Resumed(NamedTuple):
    """Where a training goes on: the next step, counted from 0, and what was counted until then."""

    step: int
    counters: Mapping[str, float]


def save_state(
    out: Path,
    step: int,
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    counters: Mapping[str, float] | None = None,
) -> None:
    """Writes everything that step `step`, counted from 0 and not done yet, needs; `counters` are handed back as they are."""
    tensors = {
        f"{prefix}.{name}": value for prefix, module in modules.items() for name, value in module.named_parameters()
    }
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
    write_state(out, step, tensors, counters)


def load_state(out: Path, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> Resumed:
    """Restores what `save_state` wrote and says where to go on; step 0 if there is nothing.

    Raises:
        KvbenchError: the file is damaged.
    """
    resumed = saved_step(out)
    if not (out / STATE).exists():
        return resumed
    tensors = read_state(out)
    with damaged(out), torch.no_grad():
        for prefix, module in modules.items():
            for name, parameter in module.named_parameters():
                parameter.copy_(tensors[f"{prefix}.{name}"])
        optimizer.load_state_dict({**optimizer.state_dict(), "state": _optimizer_state(tensors)})
    return resumed


def write_state(
    out: Path, step: int, tensors: Mapping[str, Tensor], counters: Mapping[str, float] | None = None
) -> None:
    """Writes tensors by name as the state before step `step`; whatever happens, the file is the old one or the new one."""
    metadata = {"step": str(step), "counters": json.dumps(dict(counters or {}))}
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    temporary = out / _UNFINISHED
    save_file(stored, temporary, metadata)
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(out / STATE)


def read_state(out: Path) -> dict[str, Tensor]:
    """The tensors that `write_state` wrote, on the CPU.

    Raises:
        KvbenchError: the file is damaged.
    """
    with damaged(out):
        return load_file(out / STATE)


def saved_step(out: Path) -> Resumed:
    """Where a training goes on; step 0 if there is no state.

    Raises:
        KvbenchError: the file is damaged.
    """
    if not (out / STATE).exists():
        return Resumed(0, {})
    with damaged(out), safe_open(out / STATE, "pt") as stored:
        metadata = stored.metadata()
        return Resumed(int(metadata["step"]), json.loads(metadata["counters"]))


@contextmanager
def damaged(out: Path) -> Iterator[None]:
    """Turns what a damaged state file raises into a sentence.

    Raises:
        KvbenchError: something in the block could not be read, or did not fit.
    """
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise KvbenchError(f"{out / STATE} is damaged ({error}); start afresh with --no-resume.") from error


def _optimizer_state(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        prefix, _, rest = full_name.partition(".")
        if prefix == "optimizer":
            index, _, name = rest.partition(".")
            state.setdefault(int(index), {})[name] = value
    return state


class Log:
    """`log.jsonl`: one JSON object a line, each with a `step`.

    Args:
        path: the file; a half-written last line and everything from step `step` on is dropped.
        step: the step that the run goes on with.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in _lines(path) if json.loads(line)["step"] < step]
        write_atomically(path, "".join(f"{line}\n" for line in kept).encode())
        self._stream = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record."""
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()


def _difference(found: Any, wanted: Any, name: str = "") -> str:
    """The first place where two JSON values differ, in words."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted({*found, *wanted}):
            if found.get(key) != wanted.get(key):
                return _difference(found.get(key), wanted.get(key), f"{name}.{key}" if name else key)
    return f"{name}: {json.dumps(found)} there, {json.dumps(wanted)} here"
