"""The Python face of the commands. Importing it is cheap: torch and pandas come with the first call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvbench.core.errors import KvbenchError, unknown_name

if TYPE_CHECKING:
    import pandas as pd

    from kvbench.core.policy import Policy
    from kvbench.engine.evict import Eviction
    from kvbench.models.checkpoint import Checkpoint
    from kvbench.models.source import LoadedModel

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


@contextmanager
def evict(
    model: object,
    policy: str,
    *,
    budget: int | None = None,
    cr: float | str | None = None,
    reference_length: int | None = None,
    checkpoint: str | Path | None = None,
    policy_args: Mapping[str, object] | None = None,
    seed: int = 0,
) -> Iterator[Eviction]:
    """Runs anyone's transformers model under a policy: `with kvbench.evict(model, "kvpop", budget=2048): model.generate(...)`.

    docs/evict.md says what works and what does not. The model is exactly as before afterwards.

    Args:
        model: a decoder-only transformers model on one device.
        policy: as registered.
        budget: slots per layer and KV head; not needed for `full`, which keeps everything.
        cr: fraction of the dense cache removed, instead of a budget; needs `reference_length`.
        reference_length: tokens that the dense cache is taken to hold.
        checkpoint: folder of a trained policy; without, one that is shipped for a model of this name.
        policy_args: hyper-parameters of a policy that is not trained.
        seed: of policies that draw random numbers; the same for every row, whatever shares its batch.

    Raises:
        KvbenchError: the model is not supported, or a setting or the checkpoint does not fit.
    """
    from kvbench.core.policy import Split
    from kvbench.engine.evict import evicting, loaded_from
    from kvbench.engine.run import Setting

    loaded = loaded_from(model)
    chosen, trained = _policy(policy, policy_args or {}, checkpoint, loaded)
    slots = _slots(chosen, budget, cr, reference_length)
    # What keeps everything gets its slots when the first batch comes.
    split = Split(slots=1, sinks=0, window=1) if slots is None else chosen.checked_split(slots, loaded.geometry)
    scorers = trained.scorers(loaded.geometry) if trained is not None else None
    if scorers is not None:
        scorers.to(loaded.device)
    setting = Setting(loaded, chosen, split, scorers, reference_length=reference_length or 0)
    with evicting(setting, seed, trained) as eviction:
        yield eviction


def _policy(
    name: str, args: Mapping[str, object], folder: str | Path | None, loaded: LoadedModel
) -> tuple[Policy, Checkpoint | None]:
    """The policy that `evict` was asked for, and its checkpoint if it is trained."""
    from kvbench.harness.choices import make_policy
    from kvbench.models.checkpoint import Checkpoint, find_checkpoint
    from kvbench.models.huggingface import hash_files
    from kvbench.plugins import load_registry

    entry = load_registry().policy(name)
    if not entry.learned:
        if folder is not None:
            raise KvbenchError(f"Policy '{entry.name}' is not trained, so there is no checkpoint for it; leave it out.")
        policy, fitting = make_policy(entry, [(key, str(value)) for key, value in args.items()])
        if unused := args.keys() - dict(fitting):
            raise unknown_name("policy argument", min(unused), (parameter.name for parameter in entry.parameters))
        return policy, None
    if args:
        raise KvbenchError(
            f"The arguments of policy '{entry.name}' are fixed by its checkpoint; leave policy_args out."
        )
    checkpoint = Checkpoint.load(find_checkpoint(entry.name, loaded.name, folder))
    source = loaded.model.config._name_or_path
    if checkpoint.lm_weights is None and source and Path(source).is_dir():
        # Otherwise the weights are the checkpoint's own, or where they came from has nothing to compare with.
        loaded = dataclasses.replace(loaded, weights_hash=hash_files(Path(source)))
    checkpoint.require(loaded, entry.name)
    return checkpoint.policy(entry.name), checkpoint


def _slots(policy: Policy, budget: int | None, cr: float | str | None, reference_length: int | None) -> int | None:
    """Slots that `evict` was asked for; None for a policy that keeps everything."""
    from kvbench.core.budget import Budget, parse_cr

    if not policy.evicts:
        return None
    if (budget is None) == (cr is None):
        raise KvbenchError(
            f"Policy '{policy.name}' needs either budget=SLOTS or cr=RATIO with reference_length=TOKENS."
        )
    if reference_length is None and (cr is not None or not policy.hard_budget):
        why = "cr is a share of it" if cr is not None else f"policy '{policy.name}' keeps a share of the tokens"
        raise KvbenchError(f"kvbench.evict needs reference_length, the tokens that a dense cache would hold: {why}.")
    if cr is not None:
        return Budget.from_cr(parse_cr(str(cr)), reference_length or 0).slots
    return budget


def _several(value: T | Iterable[T]) -> tuple[T, ...]:
    """One value, or several, as several; a text is one value."""
    if isinstance(value, str | Path | int | float):
        return (value,)
    return tuple(value)
