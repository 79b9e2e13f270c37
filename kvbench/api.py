"""The Python face of the commands. Importing it is cheap: torch and pandas come with the first call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T", str, int, "float | str", "str | Path")


def run(
    *,
    policy: str | Iterable[str],
    cr: float | str | Iterable[float | str] = (),
    budget: int | Iterable[int] = (),
    task: str | Iterable[str] = (),
    data: Mapping[str, str | Path] | None = None,
    gen_len: int | Iterable[int] = (),
    model: str | None = None,
    suite: str | None = None,
    limit: int | None = None,
    samples: int | None = None,
    seed: int | Iterable[int] = (),
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    reference_length: int | None = None,
    policy_args: dict[str, object] | None = None,
    checkpoint: str | Path | Iterable[str | Path] = (),
    adapted_lm: str | Path | None = None,
    dense: bool = True,
    dense_adapted: bool | None = None,
    out: str | Path = "kvbench-runs",
    shard: str = "1/1",
    device: str = "auto",
    dtype: str = "auto",
    rows: int | None = None,
    decode_path: str = "auto",
    threads: int | None = None,
    processes: int | None = 1,
) -> pd.DataFrame:
    """`kvbench run` from Python: the same names, defaults, files and resuming.

    `processes` above 1 needs a script that starts under `if __name__ == "__main__":`; None is the command's `auto`.

    Returns:
        One row a cell of this run, with the columns of `kvbench table --format json`. A failed cell is a row.

    Raises:
        KvbenchError: what the command line answers with exit code 2.
    """
    from kvbench.harness.options import RunOptions, check
    from kvbench.harness.session import open_session, run_session
    from kvbench.plugins import load_registry
    from kvbench.report.load import load
    from kvbench.report.tables import frame, only

    options = RunOptions(
        policies=_several(policy),
        crs=tuple(str(ratio) for ratio in _several(cr)),
        budgets=_several(budget),
        tasks=_several(task),
        data=tuple(f"{name}={path}" for name, path in (data or {}).items()),
        gen_lens=_several(gen_len),
        model=model,
        limit=limit,
        samples=samples,
        seeds=_several(seed),
        suite=suite,
        reference_length=reference_length,
        policy_args=tuple(f"{name}={value}" for name, value in (policy_args or {}).items()),
        checkpoints=tuple(Path(folder) for folder in _several(checkpoint)),
        adapted_lm=None if adapted_lm is None else Path(adapted_lm),
        dense=dense,
        dense_adapted=dense_adapted,
        out=Path(out),
        shard=shard,
        device=device,
        dtype=dtype,
        rows="auto" if rows is None else str(rows),
        decode_path=decode_path,
        threads=threads,
        processes="auto" if processes is None else str(processes),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
    )
    registry = load_registry()
    finished = run_session(open_session(check(options, registry), registry))
    return frame(only(load([finished.folder]), {row.key for row in finished.rows}))


def load_results(*folders: str | Path) -> pd.DataFrame:
    """Every row of one or more result folders, as `kvbench table --format json` has them.

    Raises:
        KvbenchError: a folder holds no rows, or rows of another schema.
    """
    from kvbench.report.load import load
    from kvbench.report.tables import frame

    return frame(load(Path(folder) for folder in folders))


def _several(value: T | Iterable[T]) -> tuple[T, ...]:
    """One value, or several, as several; a text is one value."""
    if isinstance(value, str | Path | int | float):
        return (value,)
    return tuple(value)
