from __future__ import annotations

import pytest
import torch
from scipy import stats

from kvbench.core.hashing import _mix, _shift, uniform

EDGES = torch.tensor([0, 1, -1, 2, -2, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**62], dtype=torch.int64)
MASK = 2**64 - 1


def _python(*counters: int) -> float:
    """The same function on Python's integers."""
    state = 0
    for counter in counters:
        z = (state + counter + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        state = z ^ (z >> 31)
    return ((state >> 41) + 0.5) * 2.0**-23


def test_equals_splitmix64_on_unbounded_integers() -> None:
    got = uniform(EDGES[:, None], EDGES[None])
    for row, first in enumerate(EDGES.tolist()):
        for column, second in enumerate(EDGES.tolist()):
            assert float(got[row, column]) == _python(first, second)


def test_the_generator_is_the_published_one() -> None:
    # First outputs of splitmix64 seeded with 1234567, as its author's test program prints them.
    state = 1234567
    outputs = []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        signed = state - 2**64 if state >= 2**63 else state
        outputs.append(int(_mix(torch.tensor(signed, dtype=torch.int64))) & MASK)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_extreme_states_stay_inside_the_open_interval() -> None:
    # What `uniform` does with the two extreme 64-bit states; the middle of the code is not reachable with chosen bits.
    for state in (torch.tensor(-1), torch.tensor(0)):
        value = (_shift(state, 41).float() + 0.5) * 2.0**-23
        assert 0 < float(value) < 1
        assert torch.isfinite(-(-value.log()).log())


@pytest.mark.parametrize(("seed", "counter"), [(82, 742853), (101, 993388), (108, 975727)])
def test_the_largest_draws_stay_below_one(seed: int, counter: int) -> None:
    # The 24 leading bits of these are ones; in fp32 they and a half are 2**24.
    assert 0.9999998 < float(uniform(torch.tensor(seed), torch.tensor(counter))) < 1


def test_uniform_and_equal_on_repeat() -> None:
    counters = torch.arange(100_000)
    for seed in (0, 1, -5, 2**62):
        draws = uniform(torch.tensor(seed), counters)
        assert torch.equal(draws, uniform(torch.tensor(seed), counters))
        assert stats.kstest(draws.double().numpy(), "uniform").pvalue > 1e-4


def test_streams_do_not_correlate() -> None:
    draws = uniform(torch.arange(40)[:, None], torch.arange(20_000)).double()
    correlation = torch.corrcoef(draws) - torch.eye(40, dtype=torch.float64)
    assert float(correlation.abs().max()) < 6 / 20_000**0.5
    neighbours = torch.corrcoef(torch.stack([draws[0, :-1], draws[0, 1:]]))[0, 1]
    assert abs(float(neighbours)) < 5 / 20_000**0.5


def test_a_draw_depends_on_its_own_counters_only() -> None:
    alone = uniform(torch.tensor([7]), torch.tensor([11]), torch.tensor([13]))
    crowd = uniform(torch.arange(10)[:, None, None], torch.arange(12)[:, None], torch.arange(14))
    assert float(crowd[7, 11, 13]) == float(alone[0])


def test_the_order_of_counters_matters() -> None:
    assert float(uniform(torch.tensor(1), torch.tensor(2))) != float(uniform(torch.tensor(2), torch.tensor(1)))
