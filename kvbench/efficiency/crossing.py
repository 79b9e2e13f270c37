"""Curves over the generation length, and where a policy becomes cheaper than the dense cache. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.efficiency.record import EfficiencyResult

Point = tuple[int, float]
"""Length and value."""


@dataclass(frozen=True)
class Line:
    """Everything measured of one policy at one budget and batch size, by length.

    Attributes:
        label: of the policy and whose loop it is.
        removed: ratio or slots; empty for `full`.
        batch: as it was asked for; None for the largest.
        dense: it is the dense cache in the same engine.
        ms: time of a step at each length.
        memory: peak at each length.
    """

    label: str
    removed: str
    batch: int | None
    dense: bool
    ms: tuple[Point, ...]
    memory: tuple[Point, ...]


def lines(rows: Sequence[EfficiencyResult]) -> list[Line]:
    """Rows that differ in nothing but the length, together; in the order in which they come first."""
    groups: dict[tuple[object, ...], list[EfficiencyResult]] = {}
    for row in rows:
        cell = row.cell
        what = (
            cell.source,
            cell.policy,
            cell.policy_args,
            cell.scorer,
            cell.batch_asked,
            cell.audited,
            cell.decode_path,
        )
        # A ratio of the length itself gives every length other slots, and is one line nevertheless.
        groups.setdefault((*what, cell.cr or cell.slots), []).append(row)
    labels = Labels(rows)
    return [_line(labels(m[0]), m) for m in groups.values() if any(row.figures for row in m)]


class Labels:
    """How rows are called: by their policy, with its arguments only if it is there with several."""

    def __init__(self, rows: Sequence[EfficiencyResult]) -> None:
        variants: dict[str, set[str]] = {}
        for row in rows:
            variants.setdefault(row.cell.policy, set()).add(row.cell.policy_args)
        self._several = {policy for policy, arguments in variants.items() if len(arguments) > 1}

    def __call__(self, row: EfficiencyResult) -> str:
        """Policy, and whose loop it is if it is not kvbench's."""
        cell = row.cell
        arguments = f"({cell.policy_args})" if cell.policy in self._several and cell.policy_args else ""
        return cell.policy + arguments + ("" if cell.source == "kvbench" else f", {cell.source}")


def removed(row: EfficiencyResult) -> str:
    """The ratio as it was written, or the number of slots."""
    if row.cell.cr is not None:
        return row.cell.cr
    return "" if row.cell.slots is None else f"{row.cell.slots} slots"


def crossing(dense: Sequence[Point], other: Sequence[Point]) -> float | None:
    """The first length at which `dense` costs more than `other`, straight between common lengths; None if it never does."""
    there = dict(other)
    gaps = [(length, value - there[length]) for length, value in dense if length in there]
    for index, (length, gap) in enumerate(gaps):
        if gap <= 0:
            continue
        if index == 0:
            return float(length)
        before, less = gaps[index - 1]
        return before + (length - before) * -less / (gap - less)
    return None


def told(dense: Sequence[Point], other: Sequence[Point]) -> str:
    """The crossing in words for a table."""
    common = sorted({length for length, _ in dense} & {length for length, _ in other})
    if not common:
        return "-"
    found = crossing(dense, other)
    if found is None:
        return f"not up to {common[-1]}"
    return f"at most {common[0]}" if found == common[0] else f"{found:.0f}"


def _line(label: str, members: Sequence[EfficiencyResult]) -> Line:
    first = members[0]
    ms: dict[int, float] = {}
    memory: dict[int, float] = {}
    for row in members:
        if row.figures is not None:
            ms |= dict(row.figures.curve) | {row.cell.gen_length: row.figures.ms_per_step}
            memory[row.cell.gen_length] = row.figures.peak_memory
    dense = first.cell.source == "kvbench" and first.cell.policy == "full"
    return Line(
        label,
        removed(first),
        first.cell.batch_asked,
        dense,
        tuple(sorted(ms.items())),
        tuple(sorted(memory.items())),
    )
