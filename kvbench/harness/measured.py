"""What generated answers and scored documents have in common in a row."""

from __future__ import annotations

from typing import Any

from kvbench.core.intervals import Estimate
from kvbench.engine.requests import Audit, Timing


def fields(name: str, estimate: Estimate | None) -> dict[str, Any]:
    """A number and its limits by the names that a row has for them."""
    value, lo, hi = (None, None, None) if estimate is None else estimate
    return {name: value, f"{name}_lo": lo, f"{name}_hi": hi}


def counted(audit: Audit, timing: Timing) -> dict[str, Any]:
    """What the engine counted and how long it took."""
    return {
        "entries_mean": audit.entries_mean,
        "entries_peak": audit.peak,
        "head_entries": audit.head_entries,
        "cr_mean": audit.cr_mean,
        "cr_peak": audit.cr_peak,
        "cr_end": audit.cr_end,
        "slots": audit.slots,
        "evictions": audit.evictions,
        "violations": audit.violations,
        "kv_bytes": audit.kv_bytes,
        "scorer_bytes": audit.scorer_bytes,
        "metadata_bytes": audit.metadata_bytes,
        "sliding_bytes": audit.sliding_bytes,
        "ms_per_step": timing.ms_per_step,
        "tokens_per_s": timing.tokens_per_s,
    }
