from __future__ import annotations

import torch
from torch import Tensor

from kvbench.core.policy import Geometry, PointwiseState, Split, StateRequest, Tokens
from kvbench.core.slots import Slots
from kvbench.engine.layer import Layer, Step
from kvbench_policies.random import Random

ROWS, BUDGET, SIZE = 1500, 8, 40
GEOMETRY = Geometry(layers=2, query_heads=2, kv_heads=2, head_dim=2)


def _state(seeds: Tensor, layer: int = 0) -> PointwiseState:
    split = Random().split(BUDGET, GEOMETRY)
    return Random().state(StateRequest(layer, len(seeds), GEOMETRY, split, seeds, torch.device("cpu")))


def _stream(layer: int = 0, size: int = SIZE) -> Tensor:
    """The positions [R, H, B] after feeding `size` tokens one by one."""
    split = Split(slots=BUDGET, sinks=0, window=1)
    slots = Slots.empty(ROWS, 2, BUDGET, 2, 0, 1, torch.float32, torch.device("cpu"))
    machine = Layer(split, slots, _state(torch.arange(ROWS), layer))
    token = torch.zeros(ROWS, 2, 1, 2)
    for position in range(size):
        machine.decode(token, token, token, 1.0, Step(torch.full((ROWS,), position), position + 1, position + 1))
    return slots.positions


def test_what_is_kept_is_a_uniform_sample_of_the_past() -> None:
    positions = _stream()
    assert (positions == SIZE - 1).sum(-1).eq(1).all(), "the newest token is kept"
    counts = torch.bincount(positions.flatten().long(), minlength=SIZE)[: SIZE - 1].double()
    draws, chance = ROWS * 2, (BUDGET - 1) / (SIZE - 1)
    deviation = (counts - draws * chance) / (draws * chance * (1 - chance)) ** 0.5
    assert float(deviation.abs().max()) < 4.5
    assert 0.4 < float(deviation.square().mean()) < 2.0


def test_the_sample_stays_uniform_at_every_length() -> None:
    for size in (BUDGET + 1, 2 * BUDGET):
        positions = _stream(size=size)
        counts = torch.bincount(positions.flatten().long(), minlength=size)[: size - 1].double()
        draws, chance = ROWS * 2, (BUDGET - 1) / (size - 1)
        assert float(((counts - draws * chance) / (draws * chance * (1 - chance)) ** 0.5).abs().max()) < 4.5


def test_heads_and_layers_draw_for_themselves() -> None:
    first, second = _stream(layer=0), _stream(layer=1)
    sets = [frozenset(head.tolist()) for positions in (first, second) for head in positions[:200].flatten(0, 1)]
    assert len(set(sets)) > 790  # 800 draws of 7 from 39
    shared = [len(set(a.tolist()) & set(b.tolist())) - 1 for a, b in zip(first[:, 0], first[:, 1], strict=True)]
    expected = (BUDGET - 1) ** 2 / (SIZE - 1)
    assert abs(sum(shared) / ROWS - expected) < 0.15


def test_a_priority_depends_on_seed_layer_head_and_position_only() -> None:
    positions = torch.tensor([[4, 9, 2], [9, 9, 4]])
    tokens = Tokens(torch.randn(2, 2, 3, 2), torch.randn(2, 2, 3, 2), positions)
    priority = _state(torch.tensor([7, 7])).priority(tokens)
    assert torch.equal(priority[0, :, 1], priority[1, :, 0])
    assert torch.equal(priority[0, :, 0], priority[1, :, 2])
    assert len(set(priority.flatten().tolist())) == 2 * 3
    assert not set(priority.flatten().tolist()) & set(_state(torch.tensor([8, 8])).priority(tokens).flatten().tolist())


def test_a_refilled_row_takes_its_new_seed() -> None:
    seeds = torch.tensor([1, 2])
    state = _state(seeds)
    tokens = Tokens(torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2), torch.tensor([[5], [5]]))
    before = state.priority(tokens)
    seeds[1] = 1
    assert torch.equal(state.priority(tokens)[1], before[0])
