"""The parts of a decode step that every policy shares: victim, overwrite, attention over the slots."""

from __future__ import annotations

from benchmarks.case import Case, Piece, Timed, nbytes, policy_named
from kvbench.core.slots import victims
from kvbench.engine.attention import over_slots, with_weights

POLICY = policy_named("streaming_llm")


def test_victims(case: Case, timed: Timed) -> None:
    def piece() -> Piece:
        slots = case.layer(POLICY).slots
        return lambda: victims(slots.priority, slots.positions)

    timed(case, piece, case.layer(POLICY).slots.priority.nbytes)


def test_write(case: Case, timed: Timed) -> None:
    position = case.step(case.slots).positions[:, None]
    key, value = case.new_pair()

    def piece() -> Piece:
        layer = case.layer(POLICY)
        place = victims(layer.slots.priority, layer.slots.positions)[..., None]
        ring = (position % layer.slots.window)[:, None].expand(-1, place.shape[1], 1)
        return lambda: layer._write(place, key, value, position, ring)

    # Read and written; the metadata of a token is a few bytes.
    timed(case, piece, 2 * nbytes(key, value))


def test_attention(case: Case, timed: Timed) -> None:
    query = case.new(case.geometry.query_heads)
    slots = case.layer(POLICY).slots

    def piece() -> Piece:
        own = case.layer(POLICY).slots
        return lambda: over_slots(query, own.keys, own.values, None, 1.0)

    timed(case, piece, nbytes(slots.keys, slots.values, query, query))


def test_attention_with_weights(case: Case, timed: Timed) -> None:
    query = case.new(case.geometry.query_heads)
    slots = case.layer(POLICY).slots

    def piece() -> Piece:
        own = case.layer(POLICY).slots
        return lambda: with_weights(query, own.keys, own.values, None, 1.0)

    written = case.geometry.group * slots.priority.nbytes  # one fp32 weight a query head and slot
    timed(case, piece, nbytes(slots.keys, slots.values, query, query) + written)
