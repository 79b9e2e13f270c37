from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from kvbench.core import ranking
from kvbench.core.errors import KvbenchError
from kvbench.core.ranking import Kept
from kvbench.kernels import check, kept


def test_on_a_cpu_it_is_the_plain_form() -> None:
    priority = torch.randn(2, 3, 40)
    mine, plain = kept.keep(priority, 2, 5, 7), Kept.of(priority, 2, 5, 7)
    assert torch.equal(mine.rank, plain.rank)
    assert torch.equal(mine.cutoff, plain.cutoff)


def test_a_kernel_is_held_to_the_plain_form_and_refused_when_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    priority = torch.randn(2, 3, 40)
    off = 0

    def running_cutoff(*given: object) -> torch.Tensor:
        return ranking.running_cutoff(*given) + off  # type: ignore[arg-type]

    monkeypatch.setattr(check, "available", lambda tensor: True)  # noqa: ARG005 - of any
    monkeypatch.setitem(sys.modules, "kvbench.kernels.cutoff", SimpleNamespace(running_cutoff=running_cutoff))
    monkeypatch.setattr(check, "_passed", set())
    assert torch.equal(kept.keep(priority, 2, 5, 7).cutoff, Kept.of(priority, 2, 5, 7).cutoff)
    monkeypatch.setattr(check, "_passed", set())
    off = 1
    with pytest.raises(KvbenchError, match=r"'running cut-off' is wrong on cpu .* off by 1"):
        kept.keep(priority, 2, 5, 7)
