from __future__ import annotations

import pytest
import torch

from kvbench.core.policy import Policy
from kvbench.efficiency.fill import fill
from kvbench.efficiency.traffic import Held, Moved, held, moved, weights_read
from kvbench.engine.requests import Sampling
from kvbench.engine.rows import Rows
from kvbench.engine.run import Setting
from kvbench_policies.dms.policy import Dms
from kvbench_policies.full import Full
from kvbench_policies.h2o import H2o
from kvbench_policies.kvpop.policy import Kvpop
from kvbench_policies.streaming_llm import StreamingLlm
from tests.engine.tiny import load, random_scorers

ROWS, LAYERS, HEADS, DIM = 3, 2, 2, 8
ENTRY = 2 * DIM * 4
"""Key and value in fp32."""


def filled(policy: Policy, length: int = 40, budget: int = 16, heads: list[list[int]] | None = None) -> Rows:
    loaded = load()
    scorers = random_scorers(policy, loaded.geometry)
    setting = Setting(loaded, policy, policy.checked_split(budget, loaded.geometry), scorers, budget, 64)
    with torch.inference_mode():
        rows = Rows(setting, ROWS, 8, Sampling())
        fill(rows, length, 4, heads)
    return rows


def of(policy: Policy, rows: Rows) -> Moved:
    return moved(load().model, rows.layers, random_scorers(policy, load().geometry))


# Counted by hand: 3 rows x 2 layers x 2 heads = 12 heads. Each reads its 16 entries and writes one: 17 x 64 bytes.
KV = 12 * 17 * ENTRY


def test_a_rank_reads_priorities() -> None:
    # 16 priorities read, 2 written, one place of the ring read and one written, one position written.
    assert of(StreamingLlm(), filled(StreamingLlm())) == Moved(
        weights=weights_read(load().model, ROWS), kv=KV, metadata=12 * (16 * 4 + 2 * 4 + 2 * 8 + 4)
    )


def test_observing_reads_positions_and_writes_every_priority() -> None:
    # Its state: a sum and an owner of 4 bytes for each of 16 slots, read and written.
    counted = of(H2o(), filled(H2o()))
    assert (counted.kv, counted.metadata, counted.state) == (KV, 12 * (16 * 4 + 2 * 16 * 4 + 4), 12 * 2 * 16 * 8)


def test_dense_ranks_nothing_and_reads_no_empty_slot() -> None:
    counted = of(Full(), filled(Full(), length=10))
    assert (counted.kv, counted.metadata, counted.scorer, counted.state) == (12 * 11 * ENTRY, 12 * 4, 0, 0)


def test_without_a_budget_what_is_held_is_read() -> None:
    policy = Dms(sinks=1, window=2, hidden=4)
    counted = of(policy, filled(policy, heads=[[5, 6], [7, 14]]))
    retained = ROWS * (5 + 6 + 7 + 14)
    assert counted.kv == (retained + 12) * ENTRY
    # Held slots are the first of each head: their positions need not be read.
    assert counted.metadata == 12 * (4 + 2 * 4 + 2 * 8)
    # Each gate: weights 16 x 4, bias 4, outer 4, constant 1, for two heads and layers, in fp32.
    assert counted.scorer == 4 * (64 + 4 + 4 + 1) * 4


def test_the_memory_of_a_learned_scorer_is_read_and_written() -> None:
    policy = Kvpop(sinks=1, window=2, features=4, values=2, hidden=4)
    rows = filled(policy)
    # Charged: 4 x 3 numbers of 4 bytes are 48, less than one slot of 64. The cells, and one stabiliser.
    assert rows.layers[0].slots.capacity == 15
    assert of(policy, rows).state == 2 * 12 * (4 * 3 + 1) * 4


def test_an_input_embedding_of_its_own_is_read_by_the_row() -> None:
    tied, untied = load(tie_word_embeddings=True), load(tie_word_embeddings=False)
    table = 64 * 32 * 4
    all_of = {m.name: sum(p.numel() * 4 for p in m.model.parameters()) for m in (untied,)}["qwen3"]
    assert weights_read(tied.model, ROWS) == all_of - table
    assert weights_read(untied.model, ROWS) == all_of - table + ROWS * 32 * 4


def test_memory_in_parts() -> None:
    rows = filled(StreamingLlm())
    there = held(load().model, rows.layers, None)
    # A ring of one place a head.
    assert (there.kv, there.metadata, there.state, there.scorer) == (12 * 16 * ENTRY, 12 * (16 * 8 + 8), 0, 0)
    assert there.weights > weights_read(load(tie_word_embeddings=True).model, ROWS) - 1
    assert there.total == there.weights + there.kv + there.metadata
    assert Held(1, 2, 3, 4, 5).total == Moved(1, 2, 3, 4, 5).total == 15


@pytest.mark.parametrize("policy", [StreamingLlm(), H2o(), Full()], ids=lambda policy: policy.name)
def test_filled_rows_are_as_if_tokens_had_been_read(policy: Policy) -> None:
    length = 10 if policy.name == "full" else 40
    slots = filled(policy, length).layers[0].slots
    assert int(slots.positions.max()) == length - 1
    for row in slots.positions.tolist():
        for head in row:
            held_positions = [p for p in head if p >= 0]
            assert len(set(held_positions)) == len(held_positions) == min(length, 16)
            assert set(range(slots.sinks)) | set(range(length - slots.window, length)) <= set(held_positions)
    newest = slots.positions.gather(-1, slots.recent)
    assert sorted(newest[0, 0].tolist()) == list(range(length - slots.window, length))
    protected = slots.priority == torch.inf
    assert int(protected[0, 0].sum()) == slots.sinks + slots.window
