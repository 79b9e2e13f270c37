"""What a learned policy computes for each token: read the new one, give a priority to the one that leaves the window."""

from __future__ import annotations

import pytest

from benchmarks.case import Case, Piece, Timed, nbytes, policy_named, weights
from kvbench.core.policy import StaticState, Tokens


@pytest.mark.parametrize("name", ["kvpop", "kvpop_mlp", "kvpop_linear"])
def test_step(name: str, case: Case, timed: Timed) -> None:
    policy, position = policy_named(name), case.step(case.slots).positions[:, None]
    new, leaving = (Tokens(*case.new_pair(), position) for _ in range(2))
    sample = case.layer(policy).state

    def piece() -> Piece:
        state = case.layer(policy).state
        assert isinstance(state, StaticState)
        return lambda: state.step(new, leaving)

    # Only a scorer with a memory reads the new token.
    read = (new, leaving) if sample.tensors() else (leaving,)
    floor = sum(nbytes(tokens.keys, tokens.values) for tokens in read)
    timed(case, piece, floor + weights(sample) + 2 * nbytes(*sample.tensors()))
