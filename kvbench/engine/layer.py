"""One layer of a run: its slots, its policy state, and the three ways in which tokens enter.

- `decode`: one token a row. Priority of what leaves the window -> victim -> overwrite -> attend -> observe.
- `prefill`: a whole prompt into fresh rows. Dense when it fits, else under the running top-k mask (static policies).
- `extend`: further tokens in chunks. All victims are chosen before the chunk attends, so that each of its tokens sees the
  chunk up to itself and what was kept; with B slots and chunks of c tokens, B - c of the older ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.core.policy import ObservedState, PointwiseState, Split, State, StaticState, Tokens
from kvbench.core.ranking import Kept
from kvbench.core.slots import Slots, several_victims, unprotected, victims
from kvbench.engine import attention
from kvbench.kernels.attention import attention_over, has_kernel
from kvbench.kernels.kept import keep

_FUSED_FROM = 4096
"""Tokens from which on a prompt is worth a kernel, which is compiled for its length."""

_QUERY_BLOCK = 256
"""Queries of a long prompt that attend at once, at most."""

_MASK_ELEMENTS = 2**28
"""Elements of the mask of such a block, at most (one byte each)."""


@dataclass
class Step:
    """What all layers share in one decode step.

    Attributes:
        positions: of the token that each row feeds [R], int64.
        shortest: tokens that every row has seen after this step, at least.
        longest: tokens that no row has exceeded after this step.
    """

    positions: Tensor
    shortest: int
    longest: int


class Layer:
    """Slots and policy state of R rows in one layer.

    Args:
        split: of the budget.
        slots: the cache.
        state: of the policy.
        frees: the policy has no hard budget: slots of tokens with priority -inf are emptied, and the next token takes the
            first empty one. Held slots are thus always the first ones of a head.
        kernels: `decode` runs compiled kernels (`fast.py`).
    """

    def __init__(self, split: Split, slots: Slots, state: State, frees: bool = False, kernels: bool = False) -> None:
        self.split = split
        self.slots = slots
        self.state = state
        self.frees = frees
        self.kernels = kernels

    def adopt(self, rows: Tensor, fresh: Layer) -> None:
        """Copies all rows of `fresh` over the rows with these indices [g], in place."""
        for mine, new in zip(self.tensors(), fresh.tensors(), strict=True):
            mine.index_copy_(0, rows, new)

    def tensors(self) -> tuple[Tensor, ...]:
        """All storage of the layer; the first dimension is the row."""
        return (*self.slots.tensors(), *self.state.tensors())

    def decode(self, query: Tensor, key: Tensor, value: Tensor, scale: float, step: Step) -> Tensor:
        """Query [R, Hq, 1, D], key and value [R, H, 1, D] -> output [R, Hq, 1, D]."""
        if self.kernels:
            from kvbench.engine import fast

            return fast.decode(self, query, key, value, scale, step.positions)
        slots = self.slots
        position = step.positions
        ring = (position % slots.window)[:, None, None].expand(-1, key.shape[1], 1)
        own = again = None
        if self.frees:
            # A row that has ended feeds its last token again, which has its slot.
            own = slots.recent.gather(-1, ring)
            again = slots.positions.gather(-1, own) == position[:, None, None]
        if isinstance(self.state, StaticState):
            self._leave(self.state, Tokens(key, value, position[:, None]), ring)
        # Before any row is full, token p goes to slot p, where none is emptied, and slots beyond the longest row are empty.
        if step.longest <= slots.capacity and not self.frees:
            place = position[:, None].expand(-1, key.shape[1])
        else:
            place = victims(slots.priority, slots.positions)
        if own is not None and again is not None:
            place = torch.where(again, own, place[..., None])[..., 0]
        self._write(place[..., None], key, value, position[:, None], ring)
        extent = min(slots.capacity, step.longest)
        if self.frees and slots.positions.device.type == "cpu":
            # Held slots are the first ones, and most slots may never be used.
            extent = int((slots.positions[:, :, :extent] >= 0).sum(-1).amax())
        keys, values = slots.keys[:, :, :extent], slots.values[:, :, :extent]
        occupied = slots.positions[:, :, :extent] >= 0 if self.frees or step.shortest < extent else None
        if not isinstance(self.state, ObservedState):
            return attention.over_slots(query, keys, values, occupied, scale)
        visible = None if occupied is None else occupied[:, :, None, None]
        out, weights = attention.with_weights(query, keys, values, visible, scale)
        self.state.observe(weights, slots)
        return out

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
        """A prompt from position 0 into fresh rows: query [R, Hq, T, D], key and value [R, H, T, D].

        `seen` [R, H, T] is filled with the number of entries that each query attends to: what is held at its step.
        """
        rows, _, size, _ = key.shape
        positions = torch.arange(size, device=key.device).expand(rows, -1)
        tokens = Tokens(key, value, positions)
        fits = size <= self.slots.capacity
        if seen is not None:
            seen.copy_(positions[:, None] + 1)
        if isinstance(self.state, StaticState):
            priority = self._protect(self.state.prefill(tokens), size)
            if self.frees:
                return self._prefill_freely(query, tokens, priority, scale, seen)
            if not fits:
                return self._prefill_under_mask(query, tokens, priority, scale, seen)
            self._fill(tokens, priority)
            return attention.causal(query, key, value, scale)
        assert fits, "prompts over budget of observed policies enter through extend"
        self._fill(tokens, torch.full(key.shape[:3], torch.inf, device=key.device))
        if not isinstance(self.state, ObservedState):
            return attention.causal(query, key, value, scale)
        visible = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
        out, weights = attention.with_weights(query, key, value, visible, scale)
        self.state.observe(weights, self.slots)
        return out

    def extend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, start: int) -> Tensor:
        """A chunk of T tokens that begins at position `start` >= 1 in every row; T at most `split.long + 1`.

        Where slots are emptied T is at most the window: a chunk's own tokens then stay until it has attended.
        """
        rows, heads, size, _ = key.shape
        observed = isinstance(self.state, ObservedState)
        if size == 1 and not observed:
            position = torch.full((rows,), start, device=key.device)
            return self.decode(query, key, value, scale, Step(position, start + 1, start + 1))
        slots = self.slots
        positions = torch.arange(start, start + size, device=key.device).expand(rows, -1)
        new = Tokens(key, value, positions)
        scored = self._leave_in_chunk(self.state, new, start) if isinstance(self.state, StaticState) else None
        place = several_victims(slots.priority, slots.positions, size)
        self._write(place, key, value, positions, (positions % slots.window)[:, None].expand(-1, heads, -1))
        if scored is not None:
            slots.priority.scatter_(-1, place[..., : scored.shape[-1]], scored)
        extent = min(slots.capacity, start + size)
        keys, values = slots.keys[:, :, :extent], slots.values[:, :, :extent]
        held = slots.positions[:, :, None, :extent]
        visible = (held >= 0) & (held <= positions[:, None, :, None])
        if not isinstance(self.state, ObservedState):
            return attention.under_mask(query, keys, values, visible, scale)
        out, weights = attention.with_weights(query, keys, values, visible[:, :, None], scale)
        self.state.observe(weights, slots)
        return out

    def _leave(self, state: StaticState, new: Tokens, ring: Tensor) -> None:
        slots = self.slots
        place = slots.recent.gather(-1, ring)
        entry = place[..., None].expand(-1, -1, 1, slots.keys.shape[-1])
        position = new.positions - slots.window
        leaving = Tokens(slots.keys.gather(2, entry), slots.values.gather(2, entry), position)
        priority = unprotected(state.step(new, leaving))[..., None]
        kept = slots.priority.gather(-1, place)
        # Sinks stay protected; before the window is full nothing leaves it.
        slots.priority.scatter_(-1, place, torch.where((position >= slots.sinks)[:, None], priority, kept))
        self._empty(place)

    def _leave_in_chunk(self, state: StaticState, new: Tokens, start: int) -> Tensor:
        """Priorities of what leaves the window while a chunk of T tokens [R, H, T] enters, the oldest first.

        Those of older tokens are stored; returned are those of the chunk's own first T - window tokens [R, H, n].
        """
        slots, size = self.slots, new.keys.shape[2]
        positions = new.positions - slots.window
        old = min(size, slots.window)
        ring = (positions[:, :old] % slots.window)[:, None].expand(-1, new.keys.shape[1], -1)
        place = slots.recent.gather(-1, ring)
        entry = place[..., None].expand(-1, -1, -1, new.keys.shape[-1])
        leaving = Tokens(
            torch.cat([slots.keys.gather(2, entry), new.keys[:, :, : size - old]], 2),
            torch.cat([slots.values.gather(2, entry), new.values[:, :, : size - old]], 2),
            positions,
        )
        if isinstance(state, PointwiseState):
            priority = state.priority(leaving)
        else:
            priority = torch.stack([state.step(_token(new, i), _token(leaving, i)) for i in range(size)], -1)
        priority = unprotected(priority).masked_fill((positions < slots.sinks)[:, None], torch.inf)
        # Before the window is full nothing leaves it.
        there = slice(min(old, max(0, slots.window - start)), old)
        slots.priority.scatter_(-1, place[..., there], priority[..., there])
        self._empty(place)
        return priority[..., old:]

    def _empty(self, place: Tensor) -> None:
        """Empties those of the slots `place` [R, H, T] whose priority is -inf, for policies that free slots."""
        if self.frees:
            slots = self.slots
            gone, held = slots.priority.gather(-1, place) == -torch.inf, slots.positions.gather(-1, place)
            slots.positions.scatter_(-1, place, torch.where(gone, place.int() - slots.capacity, held))

    def _write(self, place: Tensor, key: Tensor, value: Tensor, positions: Tensor, ring: Tensor) -> None:
        """Overwrites slots `place` [R, H, T] with the tokens at `positions` [R, T], protected for now."""
        slots = self.slots
        entry = place[..., None].expand(-1, -1, -1, key.shape[-1])
        slots.keys.scatter_(2, entry, key)
        slots.values.scatter_(2, entry, value)
        slots.positions.scatter_(-1, place, positions.to(torch.int32)[:, None].expand_as(place))
        slots.priority.scatter_(-1, place, torch.inf)
        # Of tokens that share a place in the ring the newest has it.
        slots.recent.scatter_(-1, ring[..., -slots.window :], place[..., -slots.window :])

    def _protect(self, priority: Tensor, size: int) -> Tensor:
        """Priorities [R, H, T] with sinks and the window at +inf."""
        token = torch.arange(size, device=priority.device)
        protected = (token < self.slots.sinks) | (token > size - 1 - self.slots.window)
        return unprotected(priority).masked_fill(protected, torch.inf)

    def _fill(self, tokens: Tokens, priority: Tensor) -> None:
        """Puts tokens [R, H, T] into the first T slots; the last that are held are the newest tokens of the sequence."""
        slots = self.slots
        size = tokens.keys.shape[2]
        slots.keys[:, :, :size] = tokens.keys
        slots.values[:, :, :size] = tokens.values
        slots.positions[:, :, :size] = tokens.positions[:, None] if tokens.positions.dim() == 2 else tokens.positions
        slots.priority[:, :, :size] = priority
        newest = torch.arange(-min(size, slots.window), 0, device=priority.device)
        places = (slots.positions[:, :, :size] >= 0).sum(-1, keepdim=True) + newest
        recent = slots.positions.gather(-1, places).long()
        slots.recent.scatter_(-1, recent % slots.window, places)

    def _prefill_freely(
        self, query: Tensor, tokens: Tokens, priority: Tensor, scale: float, counts: Tensor | None
    ) -> Tensor:
        """A prompt whose tokens go by their own priority alone; those that stay take the first slots, in order."""
        gone = priority == -torch.inf
        out = self._attend_kept(query, tokens, Kept.all_but(gone, self.slots.sinks, self.slots.window), scale, counts)
        order = gone.to(torch.int8).argsort(dim=-1, stable=True)
        slot = torch.arange(order.shape[-1], device=order.device)
        positions = torch.where(gone.gather(-1, order), slot - self.slots.capacity, order).to(torch.int32)
        self._fill(_taken(tokens, order, positions), priority.gather(-1, order))
        return out

    def _prefill_under_mask(
        self, query: Tensor, tokens: Tokens, priority: Tensor, scale: float, counts: Tensor | None
    ) -> Tensor:
        sinks, window, capacity = self.slots.sinks, self.slots.window, self.slots.capacity
        size = priority.shape[-1]
        kept = keep(priority, sinks, window, capacity - sinks - window)
        out = self._attend_kept(query, tokens, kept, scale, counts)
        last = kept.mask(slice(size - 1, size))[..., 0, :]
        index = last.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :capacity]
        self._fill(_taken(tokens, index, index.to(torch.int32)), priority.gather(-1, index))
        return out

    def _attend_kept(self, query: Tensor, tokens: Tokens, kept: Kept, scale: float, counts: Tensor | None) -> Tensor:
        """Attention of a whole prompt, of each query to what it keeps; how much that is goes to `counts`."""
        size = query.shape[2]
        if counts is None and size >= _FUSED_FROM and has_kernel(query):
            return attention_over(query, tokens.keys, tokens.values, kept, scale)[0]
        out = torch.empty_like(query)
        count = max(1, min(_QUERY_BLOCK, _MASK_ELEMENTS // (query.shape[0] * query.shape[1] * size)))
        for start in range(0, size, count):
            block = slice(start, min(start + count, size))
            seen = slice(0, block.stop)
            mask = kept.mask(block)[..., seen]
            if counts is not None:
                counts[..., block] = mask.sum(-1)
            out[:, :, block] = attention.under_mask(
                query[:, :, block], tokens.keys[:, :, seen], tokens.values[:, :, seen], mask, scale
            )
        return out


def _taken(tokens: Tokens, index: Tensor, positions: Tensor) -> Tokens:
    """Those of the tokens with these indices [R, H, n], in this order, at `positions` [R, H, n]."""
    entry = index[..., None].expand(-1, -1, -1, tokens.keys.shape[-1])
    return Tokens(tokens.keys.gather(2, entry), tokens.values.gather(2, entry), positions)


def _token(tokens: Tokens, index: int) -> Tokens:
    """One of several tokens, as tokens."""
    one = slice(index, index + 1)
    return Tokens(tokens.keys[:, :, one], tokens.values[:, :, one], tokens.positions[:, one])
