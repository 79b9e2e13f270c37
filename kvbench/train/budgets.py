"""Whether rows are long enough for the ratios of a training, before any work."""

from __future__ import annotations

from kvbench.core.budget import Budget
from kvbench.core.errors import KvbenchError
from kvbench.core.policy import LearnedPolicy
from kvbench.models.source import LoadedModel
from kvbench.train.data import RowSource
from kvbench.train.recipe import Recipe


def check_budgets(policy: LearnedPolicy, loaded: LoadedModel, rows: RowSource, recipe: Recipe) -> None:
    """Every ratio has to leave the policy enough slots at every level, and a scorer something to learn.

    Raises:
        KvbenchError: rows are too short for a ratio, or longer than the model's positions.
    """
    smallest = policy.smallest_budget(loaded.geometry)
    for level in sorted(recipe.levels):
        reference = rows.reference_length(level)
        if reference > loaded.max_positions:
            raise KvbenchError(
                f"Rows of level {level} have up to {reference} tokens, but model '{loaded.name}' "
                f"supports {loaded.max_positions}; leave the level out."
            )
        for cr, text in zip(rows.crs, recipe.crs, strict=True):
            slots = Budget.from_cr(cr, reference).slots
            if slots < smallest:
                raise KvbenchError(
                    f"Rows of level {level} are too short to train ratio {text}: they leave {slots} "
                    f"slots, but policy '{policy.name}' needs at least {smallest}."
                )
    longest = max(map(rows.reference_length, recipe.levels))
    for cr, text in zip(rows.crs, recipe.crs, strict=True):
        first = Budget.from_cr(cr, longest).slots
        if recipe.boundary_slots:
            # The boundary loss imagines as few slots as this.
            first = min(first, smallest - 1 + recipe.boundary_slots)
        if first + recipe.boundary_future > longest and policy.scorer(loaded.geometry) is not None:
            raise KvbenchError(
                f"Rows of at most {longest} tokens are too short to train ratio {text}: the first decision that "
                f"could be taught comes at token {first}, and {recipe.boundary_future} tokens have to follow it; use "
                "longer rows, a higher ratio or a smaller boundary_future."
            )
