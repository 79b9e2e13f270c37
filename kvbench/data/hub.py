"""Data sets of the hub, at one commit. Nothing but this module asks the network for data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvbench.core.dataset import Rows, Source
from kvbench.core.errors import KvbenchError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 10.0


def read_hub(source: Source, revision: str | None, option: str) -> Rows:
    """Read a data set at a commit, or at its newest one; with HF_HUB_OFFLINE=1, from the cache of `datasets`.

    Raises:
        KvbenchError: it cannot be had; the sentence says why and how to point to a local copy.
    """
    try:
        import datasets
    except ImportError as error:
        raise KvbenchError(
            f"Reading data set '{source.path}' from the hub needs the package 'datasets'; "
            f"pip install 'kvbench[tasks]', or give a local copy with {option}."
        ) from error
    datasets.disable_progress_bars()
    try:
        commit = _commit(source, revision)
        data_set = _load(source, commit)
    except Exception as error:  # the hub's client raises whatever its transport does
        raise _unreadable(source, error, option) from error
    found = commit or _cached_commit(data_set)
    if found is None:
        raise KvbenchError(
            f"Data set '{source.path}' was cached without its revision; connect once, or give a copy with {option}."
        )
    return Rows(data_set, f"data set '{source.path}'", found)


def _commit(source: Source, revision: str | None) -> str | None:
    """The commit of a revision or the newest; what was asked for when the hub must not be asked.

    Asking comes first even for a known commit: without a connection it fails at once, where reading tries for long.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return HfApi().dataset_info(source.path, revision=revision, timeout=_SECONDS).sha
    except OfflineModeIsEnabled:
        return revision


def _load(source: Source, commit: str | None) -> Any:
    from datasets import load_dataset

    if source.files:
        at = f"hf://datasets/{source.path}@{commit or 'main'}"
        return load_dataset("json", data_files=[f"{at}/{file}" for file in source.files], split="train")
    return load_dataset(source.path, source.config, split=source.split, revision=commit)


def _cached_commit(data_set: Any) -> str | None:
    """The commit that a cached data set was made from, as `datasets` noted it."""
    noted = [*(data_set.info.download_checksums or {}), *(file["filename"] for file in data_set.cache_files)]
    commits = {commit for text in noted for commit in _COMMIT.findall(text)}
    return commits.pop() if len(commits) == 1 else None


def _unreadable(source: Source, error: Exception, option: str) -> KvbenchError:
    from huggingface_hub import constants

    kinds = [type(cause).__name__ for cause in _causes(error)]
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set and it is not cached"
    elif any(kind in {"GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError"} for kind in kinds):
        reason = "the hub gives us no such data set"
    else:
        reason = "no connection" if any("Connect" in kind for kind in kinds) else kinds[0]
    terms = (
        f" it is gated, so accept its terms on https://huggingface.co/datasets/{source.path} and log in "
        "with 'hf auth login', or"
        if source.gated or "GatedRepoError" in kinds
        else ""
    )
    return KvbenchError(
        f"Data set '{source.path}' cannot be read from the hub ({reason});{terms} give a local copy with {option}."
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, the last link of the chain first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
