"""Cells side by side in processes of one machine.

A small model on a CPU is bound by the cost of starting operations, which more threads do not lower: one process a core
with one thread each does far more than one process with all of them. Rows are written by the parent alone.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from typing import TYPE_CHECKING

from kvbench.core.errors import KvbenchError
from kvbench.harness.options import Checked
from kvbench.plugins import load_registry

if TYPE_CHECKING:
    from kvbench.harness.execute import Outcome
    from kvbench.harness.plan import Planned
    from kvbench.harness.session import Session, Watcher

_POLL_SECONDS = 0.5
_SMALL_MODEL = 50_000_000


def processes_for(checked: Checked, device: str, parameters: int, cells: int) -> int:
    """How many processes measure `cells` cells: what was asked for, else one a core for small models on a CPU."""
    if checked.processes is not None:
        return max(1, min(checked.processes, cells))
    if device != "cpu" or parameters > _SMALL_MODEL:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), cells))


def outcomes_of(
    session: Session, todo: Sequence[Planned], processes: int, watcher: Watcher
) -> Iterator[tuple[Planned, Outcome]]:
    """Measures cells in `processes` processes; yields them as they are done.

    Raises:
        KvbenchError: a process died. What was yielded before is not lost.
    """
    threads = session.checked.threads or len(os.sched_getaffinity(0))
    checked = replace(session.checked, processes=1, threads=max(1, threads // processes))
    context = multiprocessing.get_context("spawn")
    tokens = context.Value("q", 0)
    pool = ProcessPoolExecutor(processes, context, initializer=_open, initargs=(checked, processes, tokens))
    told = 0
    try:
        pending: dict[Future[Outcome], Planned] = {pool.submit(_measure, p.cell.key): p for p in todo}
        while pending:
            tell = watcher.cell(next(iter(pending.values())))
            done, _ = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            if tell is not None:
                now = tokens.value
                tell(now - told)
                told = now
            for future in done:
                yield pending.pop(future), future.result()
    except BrokenProcessPool as error:
        raise KvbenchError(
            f"One of {processes} processes died, perhaps for want of memory; finished rows are kept. "
            "Run the same command again to go on, with --processes 1 to need less."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()


_session: Session | None = None
"""The worker's own session: a process has one, made when it starts."""

_tokens: Synchronized[int] | None = None


def _open(checked: Checked, processes: int, tokens: Synchronized[int]) -> None:
    global _session, _tokens
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_follow_parent, daemon=True).start()
    from kvbench.harness.session import open_session

    with contextlib.redirect_stderr(io.StringIO()):  # the parent has named broken plugins already
        registry = load_registry()
    _session, _tokens = open_session(checked, registry, processes), tokens


def _follow_parent() -> None:
    """A parent that is killed cannot end its workers; they end themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _measure(key: str) -> Outcome:
    assert _session is not None
    planned = next(p for p in _session.plan.planned if p.cell.key == key)
    return _session.executor.execute(planned, _add)


def _add(count: int) -> None:
    assert _tokens is not None
    with _tokens.get_lock():
        _tokens.value += count
