"""Student and engine on the path that GPUs take, with kernels that a CPU can run in place of the compiled ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex

from kvbench.core.policy import Split
from kvbench.kernels import attention, check, flex, logsumexp
from kvbench.train import student
from kvbench.train.attached import NAME, attach
from kvbench.train.documents import Documents
from kvbench.train.losses import Pairs, sample_queries
from kvbench.train.target import TargetKind
from kvbench_policies.kvpop_mlp.policy import KvpopMlp
from kvbench_policies.random import Random
from tests.engine.tiny import feed, load, text

SPLIT = Split(slots=30, sinks=2, window=6)


def _band(
    x: Tensor, y: Tensor, bias: Tensor | None, scale: float, first: int, last: int, lengths: Tensor, power: float = 1.0
) -> Tensor:
    """What the Triton kernel computes, by its definition."""
    heads, size = max(x.shape[1], y.shape[1]), x.shape[2]
    x, y = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (x, y))
    logits = x.float() @ y.float().mT * scale - (0.0 if bias is None else bias[:, :, None])
    column = torch.arange(size)
    ahead = column - column[:, None]
    seen = (ahead >= first) & (ahead <= last) & (column < lengths[:, None, None])
    return (power * logits).masked_fill(~seen[:, None], -math.inf).logsumexp(-1)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def switch() -> None:
        for module in (attention, logsumexp):
            monkeypatch.setattr(module, "has_kernel", lambda query: True)  # noqa: ARG005 - of any query
        monkeypatch.setattr("kvbench.engine.layer.has_kernel", lambda query: True)  # noqa: ARG005 - of any query
        monkeypatch.setattr("kvbench.engine.layer._FUSED_FROM", 1)
        monkeypatch.setattr(flex, "_compiled", lambda: flex.uncompiled)
        monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        monkeypatch.setattr(check, "_passed", set())
        monkeypatch.setitem(sys.modules, "kvbench.kernels.band", SimpleNamespace(band_logsumexp=_band))

    return switch


@pytest.mark.parametrize("kind", [TargetKind(), TargetKind("sparse", "mean", lookahead=9, power=2.0)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_the_student_and_its_losses(as_on_a_gpu: Callable[[], None], kind: TargetKind, packed: bool) -> None:
    loaded = load(head_dim=16)
    model: Any = type(loaded.model)(loaded.model.config)
    model.load_state_dict(loaded.model.state_dict())
    scorers = nn.ModuleList(KvpopMlp(window=6).scorer(loaded.geometry) for _ in range(2))
    for parameter in scorers.parameters():
        nn.init.normal_(parameter)
    attach(loaded, model, scorers)
    model.set_attn_implementation(NAME)
    borders = torch.tensor([[0, 0, 90], [0, 90, 160], [1, 0, 100], [1, 100, 160]])
    documents = Documents.of(borders, 2, 160) if packed else None
    lengths = borders[:, 2] - borders[:, 1] if packed else torch.tensor([160, 120])
    ids = text(2, 160)
    sample = sample_queries(lengths, 30, 10, 32, torch.Generator().manual_seed(0))

    @torch.no_grad()
    def run() -> tuple[Tensor, student.Step]:
        step = student.Step(
            split=SPLIT,
            lengths=lengths,
            sample=sample,
            pairs=Pairs(sample, SPLIT.long),
            objective=student.Objective(kind),
            documents=documents,
            measure=True,
        )
        positions = None if documents is None else documents.positions
        return model(input_ids=ids, position_ids=positions, use_cache=False, kvbench_step=step).logits, step

    plain_logits, plain = run()
    as_on_a_gpu()
    logits, fast = run()
    real = torch.arange(160) < torch.tensor([160, 160 if packed else 120])[:, None]
    torch.testing.assert_close(logits[real], plain_logits[real], atol=1e-4, rtol=1e-4)
    for name in ("boundary", "recall", "mass"):
        for layer, value in getattr(plain, name).items():
            torch.testing.assert_close(getattr(fast, name)[layer], value, atol=1e-4, rtol=1e-4)


def test_prefill_keeps_what_streaming_keeps(as_on_a_gpu: Callable[[], None]) -> None:
    loaded, ids = load(head_dim=16), text(2, 60)
    streamed = feed(loaded, Random(), 20, ids)
    as_on_a_gpu()
    parallel = feed(loaded, Random(), 20, ids, 55)
    assert parallel.kept == streamed.kept[54:]
    torch.testing.assert_close(parallel.logits, streamed.logits[:, 54:], atol=1e-4, rtol=1e-4)
