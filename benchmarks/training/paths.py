"""Trainings on two paths, several seeds each, as a table: `python -m benchmarks.training.paths DENSE FOLDER...`.

Folders hold rows of `kvbench run` and are called PATH-SEED, for the training that they evaluate. Rows know neither path nor
seed of a training, so that to `kvbench table` all of them are one policy.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from kvbench.core.errors import KvbenchError
from kvbench.core.intervals import LEVEL, Estimate
from kvbench.report.load import load
from kvbench.report.summary import summarise


class Training(NamedTuple):
    """One folder."""

    path: str
    seed: str
    checkpoint: str
    policy: str
    n: int
    relative: Estimate
    tasks: dict[str, float]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.paths", description=__doc__)
    parser.add_argument("dense", type=Path, help="result folder of policy full")
    parser.add_argument("folders", type=Path, nargs="+", help="result folders of two paths and the same seeds")
    given = parser.parse_args()
    try:
        said = render(given.dense, given.folders)
    except KvbenchError as error:
        parser.error(str(error))
    sys.stdout.write(said)


def render(dense: Path, folders: Sequence[Path]) -> str:
    """A line a training, mean and spread of each path, and the difference of the paths paired by seed, as Markdown.

    Raises:
        KvbenchError: a folder does not hold one policy, or folders are not of two paths and the same seeds.
    """
    trainings = [_training(dense, folder) for folder in folders]
    by_path: dict[str, dict[str, float]] = {}
    for training in trainings:
        by_path.setdefault(training.path, {})[training.seed] = training.relative.value
    seeds = {tuple(sorted(of)) for of in by_path.values()}
    if len(by_path) != 2 or len(seeds) != 1 or min(map(len, seeds)) < 2:
        raise KvbenchError("Folders are to be called PATH-SEED, of two paths and the same seeds, two or more.")
    (order,) = seeds
    scores = {path: np.array([of[seed] for seed in order]) for path, of in by_path.items()}
    return "\n".join([*_each(trainings), "", *_spread(scores), ""])


def _training(dense: Path, folder: Path) -> Training:
    path, _, seed = folder.name.partition("-")
    stored = load([dense, folder])
    found = [line for _, table in summarise(stored.rows, stored.grades) for line in table if line.role == "policy"]
    if len(found) != 1 or found[0].trained is None:
        raise KvbenchError(f"{folder} does not hold rows of one trained policy and ratio that {dense} has twins of.")
    line = found[0]
    checkpoint = next(row.checkpoint or "" for row in stored.rows if row.role == "policy")
    held_out = {row.task for row in stored.rows if row.held_out}
    tasks = {f"{task}*" if task in held_out else task: of.value for task, of in line.tasks.items() if of is not None}
    return Training(path, seed, checkpoint, f"{line.label}, {line.requested} removed", line.n, found[0].trained, tasks)


def _each(trainings: Sequence[Training]) -> list[str]:
    names = trainings[0].tasks
    said = [
        f"{trainings[0].policy}: relative scores",
        "",
        f"| training | checkpoint | n | relative [95 %] | {' | '.join(names)} |",
        "| :-- | :-- | --: | --: |" + " --: |" * len(names),
    ]
    for path, seed, checkpoint, _, n, relative, tasks in trainings:
        pooled = f"{relative.value:.3f} [{relative.lo:.2f}, {relative.hi:.2f}]"
        by_task = " | ".join(f"{tasks[name]:.3f}" for name in names)
        said.append(f"| {path}-{seed} | {checkpoint[:8]} | {n} | {pooled} | {by_task} |")
    return said


def _spread(scores: dict[str, np.ndarray]) -> list[str]:
    """Of relative scores in the order of the seeds."""
    (one, mine), (other, theirs) = scores.items()
    lo, hi = stats.ttest_rel(mine, theirs).confidence_interval(LEVEL)
    pairs = len(mine)
    # Within paths, so that nothing of what a path does is taken for chance.
    within = math.sqrt((mine.var(ddof=1) + theirs.var(ddof=1)) / 2)
    apart = _quantile(2 * pairs - 2) * math.sqrt(2) * within
    return [
        "| path | trainings | mean | standard deviation |",
        "| :-- | --: | --: | --: |",
        *(f"| {path} | {len(of)} | {of.mean():.3f} | {of.std(ddof=1):.3f} |" for path, of in scores.items()),
        "",
        f"- {one} less {other}: {(mine - theirs).mean():.4f} [{lo:.3f}, {hi:.3f}], Student's interval over {pairs} seeds",
        f"- two trainings of one path: within {apart:.3f} of each other in 95 of 100 cases",
        "- relative, *: as in the other tables; intervals of the first table are over problems",
    ]


def _quantile(freedom: int) -> float:
    return float(stats.t.ppf(0.5 + LEVEL / 2, freedom))


if __name__ == "__main__":
    main()
