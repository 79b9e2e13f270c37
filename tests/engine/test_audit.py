"""What the audit reports, against counts made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.core.policy import Policy
from kvbench.engine.generate import Engine
from kvbench.engine.requests import Request
from kvbench_policies.full import Full
from kvbench_policies.random import Random
from kvbench_policies.streaming_llm import StreamingLlm
from kvbench_policies.tova import Tova
from tests.engine.tiny import SLIDING, Delayed, Table, load, text

REQUESTS = [(1, 20), (5, 1), (12, 7), (13, 25), (30, 3), (40, 2)]
BUDGET = 12


def _requests() -> list[Request]:
    return [Request(tuple(text(size).tolist()), cap) for size, cap in REQUESTS]


@pytest.mark.parametrize(
    "policy", [Random(), StreamingLlm(), Tova(), Table(), Delayed()], ids=lambda policy: policy.name
)
@pytest.mark.parametrize("rows", [1, 4])
def test_ratios_and_evictions(policy: Policy, rows: int) -> None:
    audit = Engine(load(), policy, BUDGET, rows=rows).generate(_requests(), reference_length=100).audit
    seen = [[prompt + new for new in range(cap)] for prompt, cap in REQUESTS]  # the last token is never fed
    removed = [[1 - min(BUDGET, length) / length for length in lengths] for lengths in seen]
    assert audit.cr_mean == pytest.approx(sum(map(sum, removed)) / sum(map(len, removed)), abs=1e-12)
    assert audit.cr_end == pytest.approx(sum(one[-1] for one in removed) / len(removed), abs=1e-12)
    assert (audit.slots, audit.peak, audit.violations) == (BUDGET, BUDGET, 0)
    assert audit.cr_peak == pytest.approx(1 - BUDGET / 100)
    assert audit.evictions == sum(max(0, lengths[-1] - BUDGET) for lengths in seen) * 2 * 2  # layers and KV heads


def test_full_removes_nothing() -> None:
    audit = Engine(load(), Full(), None, rows=2).generate(_requests()).audit
    assert (audit.cr_mean, audit.cr_end, audit.evictions, audit.violations) == (0, 0, 0, 0)
    longest_fed = max(prompt + cap - 1 for prompt, cap in REQUESTS)
    assert audit.peak == longest_fed
    assert audit.slots == longest_fed + 1


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_bytes_are_those_of_kv_heads_and_slots(
    heads: int, kv_heads: int, dtype: torch.dtype, size: int, rows: int
) -> None:
    loaded = load("llama", heads, kv_heads, dtype=dtype)
    audit = Engine(loaded, StreamingLlm(), BUDGET, rows=rows).generate(_requests()).audit
    assert audit.kv_bytes == 2 * kv_heads * BUDGET * 2 * 8 * size
    assert audit.scorer_bytes == 0
    # int32 positions, fp32 priorities, a ring of one int64
    assert audit.metadata_bytes == 2 * kv_heads * (BUDGET * (4 + 4) + 8)


def test_state_that_a_policy_keeps_is_counted() -> None:
    audit = Engine(load(), Delayed(), BUDGET, rows=2).generate(_requests()).audit
    assert audit.scorer_bytes == 2 * 2 * 4


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_sliding"])
@pytest.mark.parametrize("policy", [Random(), Tova()], ids=lambda policy: policy.name)
def test_sliding_layers_are_left_out(kind: str, policy: Policy) -> None:
    audit = Engine(load(kind), policy, BUDGET, rows=2).generate(_requests()).audit
    assert audit.kv_bytes == 1 * 2 * BUDGET * 2 * 8 * 4
    assert audit.slots == audit.peak == BUDGET != SLIDING
    assert audit.evictions == sum(max(0, prompt + cap - 1 - BUDGET) for prompt, cap in REQUESTS) * 2
    lengths = [prompt + new for prompt, cap in REQUESTS for new in range(cap)]
    assert audit.cr_mean == pytest.approx(sum(1 - min(BUDGET, length) / length for length in lengths) / len(lengths))


def test_peak_below_the_budget() -> None:
    audit = Engine(load(), Random(), 50).generate([Request((1, 2, 3), 8)]).audit
    assert (audit.slots, audit.peak, audit.cr_mean, audit.evictions) == (50, 10, 0, 0)


def test_the_tensors_hold_what_is_reported() -> None:
    held: list[Tensor] = []

    def note(layer: int, step: int, positions: Tensor) -> None:
        held.append(positions.clone())

    Engine(load(), Table(), BUDGET, rows=1).generate([Request(tuple(text(30).tolist()), 30)], observer=note)
    for step in range(29):
        for positions in held[2 * step : 2 * step + 2]:
            for head in positions[0].tolist():
                assert len(set(head)) == len(head) == BUDGET
                assert min(head) >= 0
                assert max(head) == 30 + step
