"""How decode steps run: plainly, captured as a CUDA graph, or captured with compiled kernels. Chosen by rule, named in the row.

| name | what runs |
|---|---|
| `plain` | operation by operation: CPUs, and steps that somebody observes |
| `cuda_graph` | the same operations, captured |
| `cuda_graph+cache_kernels` | captured; slots, attention and the policy's own kernels; the model by transformers |
| `cuda_graph+kernels` | captured; the model's products too, or, of more than 64 rows, what lies between them |
| `cuda_graph (kernels failed)` | captured plainly, since the kernels did not pass the comparison with the plain form here |
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final

from kvbench.core.errors import KvbenchError
from kvbench.engine.audit import Auditor
from kvbench.engine.graph import GraphedStep, PlainStep
from kvbench.engine.rows import Rows
from kvbench.engine.run import Setting
from kvbench.models.source import LoadedModel

WORTH_COMPILING: Final = 2**28
"""Bytes of weights from which on `auto` takes kernels: below, seconds of compilation buy microseconds a step."""

_log = logging.getLogger(__name__)
_passed: set[object] = set()


@dataclass(frozen=True)
class Chosen:
    """A setting that runs as `name` says; `captured` as CUDA graphs."""

    name: str
    setting: Setting
    captured: bool

    def step(self, rows: Rows, auditor: Auditor | None = None) -> PlainStep | GraphedStep:
        """What runs a step of these rows, which are of this setting."""
        return (GraphedStep if self.captured else PlainStep)(rows, auditor)


def choose(setting: Setting, rows: int, wanted: str = "auto") -> Chosen:
    """The way in which steps of so many rows run; the model's attention has to be the engine's already (`contact`).

    Args:
        setting: of the run.
        rows: sequences side by side.
        wanted: `plain`, `graph` or `kernels`; `auto` decides by device and size of the model.

    Raises:
        KvbenchError: kernels or capture were asked for and cannot be had.
    """
    loaded = setting.loaded
    cuda = loaded.device.type == "cuda"
    require(wanted, loaded)
    if not cuda or wanted == "plain":
        return Chosen("plain", setting, captured=False)
    triton = find_spec("triton") is not None
    large = sum(parameter.nbytes for parameter in loaded.model.parameters()) >= WORTH_COMPILING
    if wanted == "graph" or not triton or not (large or wanted == "kernels"):
        return Chosen("cuda_graph", setting, captured=True)
    fast = with_kernels(setting)
    name = "cuda_graph+cache_kernels" if fast.segments is None else "cuda_graph+kernels"
    try:
        _check(fast, rows)
    except Exception as error:
        if wanted == "kernels":
            raise
        # Whatever the compiler raises: the plain operations still work.
        _log.warning("The decode kernels are not used: %s: %s", type(error).__name__, error)
        return Chosen("cuda_graph (kernels failed)", setting, captured=True)
    return Chosen(name, fast, captured=True)


def require(wanted: str, loaded: LoadedModel) -> None:
    """Refuses a path that cannot be had for this model.

    Raises:
        KvbenchError: there is no CUDA device, or no Triton.
    """
    if wanted in ("graph", "kernels") and loaded.device.type != "cuda":
        raise KvbenchError(f"The decode path '{wanted}' needs a CUDA device; this model is on {loaded.device.type}.")
    if wanted == "kernels" and find_spec("triton") is None:
        raise KvbenchError("The decode path 'kernels' needs the package triton; PyTorch for CUDA brings it along.")


def with_kernels(setting: Setting) -> Setting:
    """The same setting with kernels, and with the model's products by kernels where its type is known."""
    from kvbench.engine.segments import Segments

    return replace(setting, kernels=True, segments=Segments.of(setting.loaded))


def _check(setting: Setting, rows: int) -> None:
    """Compares once a process and kind of run."""
    from kvbench.engine.compare import compare

    loaded = setting.loaded
    case = (setting.policy, loaded.geometry, loaded.dtype, loaded.name, loaded.weights_hash, rows)
    if case not in _passed:
        compare(setting, rows)
        _passed.add(case)
