from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.slots import Slots, several_victims, victims

PRIORITIES = st.lists(st.sampled_from([0.0, -0.0, 1.0, -2.0, math.inf, -math.inf]), min_size=1, max_size=20)


def _empty(rows: int = 2, heads: int = 3, slots: int = 5, window: int = 2) -> Slots:
    return Slots.empty(rows, heads, slots, 4, 1, window, torch.float32, torch.device("cpu"))


def test_an_empty_cache_fills_in_order() -> None:
    slots = _empty()
    for place in range(slots.capacity):
        assert victims(slots.priority, slots.positions).eq(place).all()
        slots.priority[:, :, place] = -torch.inf  # the worst that a token can have still outranks an empty slot
        slots.positions[:, :, place] = place
    assert victims(slots.priority, slots.positions).eq(0).all()


def test_a_larger_cache_fills_its_first_empty_slot_first() -> None:
    slots = _empty()
    for place in (0, 1, 3, 4):
        slots.priority[:, :, place] = 0.0
        slots.positions[:, :, place] = place
    slots.grow(12)
    for place in (2, 5, 6):
        assert victims(slots.priority, slots.positions).eq(place).all()
        slots.priority[:, :, place] = 0.0
        slots.positions[:, :, place] = 7 + place


@given(PRIORITIES, st.randoms(use_true_random=False))
def test_the_victim_is_the_lowest_and_then_the_oldest(priority: list[float], order: object) -> None:
    size = len(priority)
    positions = torch.randperm(size, dtype=torch.int32)
    expected = min(range(size), key=lambda slot: (priority[slot], int(positions[slot])))
    assert int(victims(torch.tensor(priority), positions)) == expected


@given(PRIORITIES, st.integers(0, 19))
@settings(deadline=None)
def test_several_victims_are_the_victims_one_after_the_other(priority: list[float], count: int) -> None:
    size = len(priority)
    count = min(count, sum(value < math.inf for value in priority))
    values, positions = torch.tensor(priority), torch.randperm(size, dtype=torch.int32) - 3
    expected = []
    left = values.clone()
    for _ in range(count):
        expected.append(int(victims(left, positions)))
        left[expected[-1]] = torch.inf
        # What was overwritten is the newest.
        positions_now = positions.clone()
        positions_now[expected] = 1000
        assert int(victims(left, positions_now)) == int(victims(left, positions)) or left.eq(torch.inf).all()
    assert several_victims(values, positions, count).tolist() == expected


def test_set_priority_keeps_sinks_window_and_empty_slots() -> None:
    slots = Slots.empty(1, 1, 8, 4, sinks=1, window=2, dtype=torch.float32, device=torch.device("cpu"))
    slots.positions[..., :6] = torch.tensor([0, 9, 3, 4, 8, 5])
    slots.set_priority(torch.tensor([[[1.0, 1.0, math.nan, math.inf, 2.0, -math.inf, 7.0]]]))
    infinity, largest = math.inf, torch.finfo(torch.float32).max
    # Sink 0 and, when token 10 comes, token 9 are protected; nothing that a policy says is as high.
    expected = [infinity, infinity, -infinity, largest, 2.0, -infinity, -infinity, -infinity]
    assert slots.priority.tolist() == [[expected]]


def test_a_window_of_one_protects_no_token_that_was_there_before() -> None:
    slots = Slots.empty(1, 1, 3, 4, sinks=0, window=1, dtype=torch.float32, device=torch.device("cpu"))
    slots.positions[...] = torch.arange(3)
    slots.set_priority(torch.tensor([[[3.0, 2.0, 1.0]]]))
    assert slots.priority.tolist() == [[[3.0, 2.0, 1.0]]]


def test_every_tensor_is_listed_with_rows_first() -> None:
    slots = _empty(rows=7)
    held = [value for value in vars(slots).values() if isinstance(value, torch.Tensor)]
    assert {id(tensor) for tensor in held} == {id(tensor) for tensor in slots.tensors()}
    assert all(tensor.shape[0] == 7 for tensor in held)
