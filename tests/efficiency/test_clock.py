from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvbench.core.policy import Policy, Split
from kvbench.efficiency.clock import STEPS_BESIDE, bandwidth, time_steps
from kvbench.efficiency.fill import fill
from kvbench.engine.graph import GraphedStep
from kvbench.engine.requests import Sampling
from kvbench.engine.rows import Rows
from kvbench.engine.run import Setting, contact
from kvbench_policies.full import Full
from kvbench_policies.streaming_llm import StreamingLlm
from tests.engine.tiny import load

CPU = torch.device("cpu")


def test_steps_that_had_to_be_prepared_do_not_count() -> None:
    answers = iter([False, False, True, True, False, False, True, True, True])
    assert time_steps(lambda: next(answers), 4, CPU).n == 4
    assert list(answers) == []
    with pytest.raises(RuntimeError, match="only 0 of 4 steps"):
        time_steps(lambda: False, 4, CPU)


def test_the_median_and_quartiles_are_of_single_steps() -> None:
    times = time_steps(lambda: True, 30, CPU)
    assert 0 < times.lo <= times.median <= times.hi


def test_a_copy_takes_time() -> None:
    assert 1e8 < bandwidth(CPU) < 1e13


class Graph:
    """What a test without a GPU can know of a graph: that it was replayed."""

    def replay(self) -> None:
        pass


@contextmanager
def capture(graph: Graph, pool: object) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("policy", "length", "extents"),
    [
        (Full(), 512, {(0, 512)}),
        (Full(), 530, {(0, 512), (0, 531)}),
        (StreamingLlm(), 512, {(64, 65)}),
    ],
)
def test_filled_rows_time_replays_of_one_extent_or_two(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, length: int, extents: set[tuple[int, int]]
) -> None:
    """Dense rows attend to the slots of their length rounded up, and to no more than there are."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    asked: set[tuple[int, int]] = set()
    step_of = Rows.step

    def noted(self: Rows, *, extent: tuple[int, int]) -> None:
        asked.add(extent)
        step_of(self, extent=extent)

    monkeypatch.setattr(Rows, "step", noted)
    loaded, count = load(positions=2048), 30
    split = policy.checked_split(64, loaded.geometry) if policy.evicts else Split(length + 1, 0, 1)
    further = count + STEPS_BESIDE
    with torch.inference_mode(), contact(loaded):
        rows = Rows(Setting(loaded, policy, split, None, length + 1, length), 2, further + 1, Sampling())
        fill(rows, length - further, further)
        graphed = GraphedStep(rows)

        def step() -> bool:
            ready = graphed()
            rows.advance()
            return ready

        assert time_steps(step, count, CPU).n == count
    assert asked == extents
