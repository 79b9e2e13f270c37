"""What a number was measured with: versions, commit, device."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from kvbench.core.result import Environment


@dataclass(frozen=True)
class Commit:
    """Where the code came from.

    Attributes:
        sha: of the checkout, or of `KVBENCH_COMMIT` where there is none; None when unknown.
        dirty: whether files differ from it; None when unknown.
    """

    sha: str | None
    dirty: bool | None


@cache
def commit() -> Commit:
    """The commit of the checkout that kvbench runs from.

    `KVBENCH_COMMIT` wins, since a copy without history may lie inside somebody else's checkout; a trailing `-dirty`
    there says that files differ.
    """
    named = os.environ.get("KVBENCH_COMMIT", "").strip()
    if named:
        return Commit(named.removesuffix("-dirty"), named.endswith("-dirty"))
    package = Path(__file__).resolve().parent.parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top) != package.parent:
        return Commit(None, None)
    sha = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    return Commit(sha, None if sha is None or changes is None else bool(changes))


def environment(device: str, processes: int = 1) -> Environment:
    """Versions and machine, for a run on `cpu` or `cuda` in one of several processes."""
    import torch

    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version("transformers"),
        kvbench=version("kvbench"),
        dirty=commit().dirty,
        platform=f"{platform.system()} {platform.machine()}",
        device_name=torch.cuda.get_device_name() if device == "cuda" else _processor(),
        threads=torch.get_num_threads(),
        processes=processes,
    )


def _processor() -> str:
    """The processor's own name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
