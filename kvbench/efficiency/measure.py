"""One cell through kvbench's own engine: fill, step, count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from kvbench.core.policy import Policy, Split, kept_share
from kvbench.efficiency.clock import STEPS_BESIDE, Times, time_calls, time_steps
from kvbench.efficiency.fill import fill
from kvbench.efficiency.heads import head_lengths
from kvbench.efficiency.memory import clear, one_error, peak
from kvbench.efficiency.record import EfficiencyCell, Figures
from kvbench.efficiency.traffic import Held, Moved, entries, held, moved
from kvbench.engine.audit import Auditor
from kvbench.engine.graph import GraphedStep, PlainStep
from kvbench.engine.path import choose
from kvbench.engine.requests import Sampling
from kvbench.engine.rows import Rows
from kvbench.engine.run import Setting, contact, prefill
from kvbench.models.source import LoadedModel

_PREFILLS = 3

_PREFILL_TOKENS = 2**15
"""Tokens of prompts that one model call reads, at most, as in `Engine.generate`."""

Heads = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Subject:
    """What runs in a cell.

    Attributes:
        loaded: the model.
        policy: hyper-parameters.
        scorers: one a layer, on the model's device; None for policies without.
        head_shape: measured lengths of heads, for a policy without a hard budget; a stated distribution if left out.
    """

    loaded: LoadedModel
    policy: Policy
    scorers: nn.ModuleList | None = None
    head_shape: tuple[float, ...] | None = None

    def setting(self, cell: EfficiencyCell) -> Setting:
        """The engine's view of a cell, with slots for its length and no more than the policy needs.

        Raises:
            KvbenchError: the budget is below the policy's smallest.
        """
        # One slot stays empty, so that no timed step is the first that finds the cache full.
        everything = cell.gen_length + 1
        if cell.slots is None:
            split = Split(slots=everything, sinks=0, window=1)
        else:
            split = self.policy.checked_split(cell.slots, self.loaded.geometry)
        heads = self.heads(cell, cell.gen_length)
        room = everything if heads is None else max(max(layer) for layer in heads) + further(cell)
        return Setting(self.loaded, self.policy, split, self.scorers, min(everything, room), cell.reference_length)

    def heads(self, cell: EfficiencyCell, length: int) -> Heads | None:
        """Entries of each layer and head after `length` tokens; None for a policy with a hard budget.

        Their mean is the share of tokens that the policy is matched to: the budget at the reference length, and in proportion
        elsewhere, since nothing bounds it.
        """
        if self.policy.hard_budget or cell.slots is None:
            return None
        split, geometry = self.policy.split(cell.slots, self.loaded.geometry), self.loaded.geometry
        protected = min(length, split.sinks + split.window)
        mean = protected + round(kept_share(split, cell.reference_length) * (length - protected))
        return head_lengths(geometry.layers, geometry.kv_heads, mean, protected, length, self.head_shape)


def further(cell: EfficiencyCell) -> int:
    """Steps that may run after a length was filled."""
    return cell.steps + STEPS_BESIDE


def measure(subject: Subject, cell: EfficiencyCell, batch: int, bandwidth: float, *, reads: bool = True) -> Figures:
    """Times the steps of `batch` rows up to the cell's length, and the reading of their prompts unless `reads` is false.

    Raises:
        KvbenchError: the policy cannot run so; torch.OutOfMemoryError: there is no room.
    """
    loaded, setting = subject.loaded, subject.setting(cell)
    device = loaded.device
    with one_error(), torch.inference_mode(), contact(loaded):
        clear(device)
        chosen = choose(setting, batch, cell.decode_path)
        # Comparing the kernels took memory that is none of the steps'.
        clear(device)
        rows = Rows(chosen.setting, batch, further(cell) + 1, Sampling())
        auditor = Auditor(setting, rows)
        step = chosen.step(rows, auditor if cell.audited else None)
        curve = {length: time_length(subject, step, rows, cell, length) for length in lengths(cell)}
        times = curve[cell.gen_length]
        top = peak(device)
        there = held(loaded.model, rows.layers, subject.scorers)
        moving = moved(loaded.model, rows.layers, subject.scorers)
        retained, path = entries(rows.layers), chosen.name
        del rows, auditor, step
        clear(device)
        reading, reading_peak, notes = _time_prefill(setting, cell, batch) if reads else (None, None, ())
    generation = _area([(length, one.median) for length, one in curve.items()])
    return Figures(
        path=path,
        batch=batch,
        capacity=setting.capacity,
        entries=retained,
        **step_figures(times, batch, moving, bandwidth),
        **memory_figures(there, top),
        prefill_ms=reading,
        prefill="exact" if subject.policy.static or cell.prompt_length <= setting.capacity else "chunked",
        prefill_peak=reading_peak,
        curve=tuple((length, one.median) for length, one in curve.items()),
        generation_s=generation / 1000,
        generation_tokens_per_s=1000 * batch * cell.gen_length / generation,
        head_lengths=subject.heads(cell, cell.gen_length - further(cell)),
        notes=notes,
    )


def lengths(cell: EfficiencyCell) -> list[int]:
    """Where steps are timed, ascending: `points` lengths at even distances, each with room for its steps."""
    spaced = (cell.gen_length * (index + 1) // cell.points for index in range(cell.points))
    return [length for length in spaced if length > further(cell)] or [cell.gen_length]


def time_length(
    subject: Subject, step: PlainStep | GraphedStep, rows: Rows, cell: EfficiencyCell, length: int
) -> Times:
    """Times steps of rows that have then seen `length` tokens."""
    before = length - further(cell)
    fill(rows, before, further(cell), subject.heads(cell, before))

    def advanced() -> bool:
        ready = step()
        rows.advance()
        return ready

    return time_steps(advanced, cell.steps, rows.ids.device)


def step_figures(times: Times, batch: int, moving: Moved, bandwidth: float) -> dict[str, Any]:
    """Time of a step and its floor, by the names of `Figures`."""
    floor = 1000 * moving.total / bandwidth
    return {
        "ms_per_step": times.median,
        "ms_lo": times.lo,
        "ms_hi": times.hi,
        "n": times.n,
        "tokens_per_s": 1000 * batch / times.median,
        "bandwidth": bandwidth,
        "moved_weights": moving.weights,
        "moved_kv": moving.kv,
        "moved_metadata": moving.metadata,
        "moved_scorer": moving.scorer,
        "moved_state": moving.state,
        "floor_ms": floor,
        "floor_ratio": times.median / floor,
    }


def memory_figures(there: Held, top: int | None) -> dict[str, Any]:
    """Memory and its parts, by the names of `Figures`."""
    return {
        "memory": "counted" if top is None else "measured",
        "peak_memory": there.total if top is None else top,
        "weights_bytes": there.weights,
        "kv_bytes": there.kv,
        "scorer_bytes": there.scorer,
        "metadata_bytes": there.metadata,
        "state_bytes": there.state,
        "workspace_bytes": None if top is None else top - there.total,
    }


def _time_prefill(
    setting: Setting, cell: EfficiencyCell, batch: int
) -> tuple[float | None, int | None, tuple[str, ...]]:
    """Time of reading the prompts of all rows, as many at once as the engine would read, and the peak of it."""
    device, size = setting.loaded.device, cell.prompt_length
    if not setting.policy.evicts:
        # A prompt needs no slots for what comes after it.
        setting = replace(setting, split=replace(setting.split, slots=size + 1), longest=size + 1)
    elif not setting.policy.hard_budget:
        setting = replace(setting, longest=size + 1)
    count = max(1, min(batch, _PREFILL_TOKENS // size))
    prompts = torch.zeros(count, size, dtype=torch.int64, device=device)
    seeds = torch.arange(count, device=device)
    try:
        times = time_calls(lambda: prefill(setting, setting.layers(count, seeds), prompts), _PREFILLS, device)
    except torch.OutOfMemoryError:
        return None, None, (f"reading {count} prompts of {size} tokens ran out of memory",)
    return times.median * batch / count, peak(device), ()


def _area(points: Sequence[tuple[int, float]]) -> float:
    """Milliseconds of all steps up to the last point, straight between points and level before the first."""
    first, _ = points[0]
    area = first * points[0][1]
    for (start, low), (end, high) in pairwise(points):
        area += (end - start) * (low + high) / 2
    return area
