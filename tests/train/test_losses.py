from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbench.core.ranking import Kept, ranks, running_cutoff
from kvbench.train.losses import Sample, boundary_loss, sample_queries

SINKS, WINDOW, LONG = 2, 4, 5


def _slow_boundary(student: Tensor, teacher: Tensor, sample: Sample, margin: float, temperature: float) -> float:
    """One pair at a time, from sorted lists."""
    total, count = 0.0, 0
    for row in range(teacher.shape[0]):
        for head in range(teacher.shape[1]):
            mine, wanted = student[row, head].tolist(), teacher[row, head].tolist()
            for query, valid in zip(sample.queries[row].tolist(), sample.valid[row].tolist(), strict=True):
                if not valid:
                    continue
                count += 1
                newcomer = query - WINDOW
                eligible = sorted(range(SINKS, query - WINDOW), key=lambda t: (wanted[t], t), reverse=True)
                incumbent = eligible[LONG - 1]
                kept = (wanted[newcomer], newcomer) > (wanted[incumbent], incumbent)
                weight = 1 - math.exp(-abs(wanted[newcomer] - wanted[incumbent]) / margin) if margin else 1
                difference = (mine[newcomer] - mine[incumbent]) / temperature
                total += weight * math.log1p(math.exp(-difference if kept else difference))
    return total / count


@pytest.mark.parametrize(("margin", "temperature"), [(0.5, 1.0), (2.0, 0.7), (0.0, 1.0)])
def test_boundary_loss_is_the_loop_over_pairs(margin: float, temperature: float) -> None:
    student, teacher = torch.randn(3, 2, 60), torch.randn(3, 2, 60)
    # Half of the teacher's scores tie with another.
    teacher[..., ::2] = teacher[..., ::2].round()
    lengths = torch.tensor([60, 40, 9])
    first = SINKS + WINDOW + LONG
    sample = sample_queries(lengths, first, 5, 24, torch.Generator().manual_seed(1))
    assert sample.valid.sum(1).tolist() == [24, 24, 0]
    kept = Kept.of(teacher, SINKS, WINDOW, LONG)
    loss = boundary_loss(student, teacher, kept, sample, margin=margin, temperature=temperature)
    assert loss.item() == pytest.approx(_slow_boundary(student, teacher, sample, margin, temperature), rel=1e-5)


def test_the_first_sampled_query_is_the_first_that_evicts() -> None:
    rank = ranks(torch.randn(1, 1, 40))
    cutoff = running_cutoff(rank, SINKS, WINDOW, LONG)[0, 0]
    first = SINKS + WINDOW + LONG
    # Before it everything eligible is kept, so there is no incumbent that could lose.
    assert cutoff[first - 2] == 40
    assert cutoff[first - 1] < 40


def test_a_perfect_student_loses_less_than_its_opposite() -> None:
    teacher = 5 * torch.randn(2, 2, 80)
    sample = sample_queries(torch.tensor([80, 80]), SINKS + WINDOW + LONG, 5, 40, torch.Generator().manual_seed(0))
    kept = Kept.of(teacher, SINKS, WINDOW, LONG)
    for balance in (False, True):
        good = boundary_loss(teacher, teacher, kept, sample, balance=balance)
        bad = boundary_loss(-teacher, teacher, kept, sample, balance=balance)
        assert good < 0.3 < bad


def test_queries_stay_inside_each_row() -> None:
    lengths = torch.tensor([200, 90, 30])
    sample = sample_queries(lengths, 40, 20, 500, torch.Generator().manual_seed(3))
    for row, (low, high) in enumerate([(40, 180), (40, 70)]):
        assert sample.valid[row].all()
        assert sample.queries[row].min() >= low
        assert sample.queries[row].max() <= high
        # Both ends come up.
        assert sample.queries[row].min() <= low + 3
        assert sample.queries[row].max() >= high - 3
    assert not sample.valid[2].any()
    uniform, later = sample.queries[0, :250].float().mean(), sample.queries[0, 250:].float().mean()
    assert uniform + 10 < later


def test_queries_follow_from_the_generator() -> None:
    def draw() -> Tensor:
        return sample_queries(torch.tensor([100]), 10, 5, 20, torch.Generator().manual_seed(7)).queries

    assert torch.equal(draw(), draw())


def test_balance_weighs_both_outcomes_of_a_head_the_same() -> None:
    student, teacher = torch.zeros(2, 2, 80), torch.randn(2, 2, 80)
    sample = sample_queries(torch.tensor([80, 80]), SINKS + WINDOW + LONG, 5, 40, torch.Generator().manual_seed(0))
    kept = Kept.of(teacher, SINKS, WINDOW, LONG)
    # With equal scores and no margin every pair costs log 2, and the weights of a head sum to its pairs.
    loss = boundary_loss(student, teacher, kept, sample, margin=0, balance=True)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-5)
    # Without balance "the newcomer loses", which is the rule late in a row, is right most of the time.
    older = -torch.arange(80.0).expand(2, 2, -1)
    plain, balanced = (boundary_loss(older, teacher, kept, sample, margin=0, balance=way) for way in (False, True))
    assert plain < balanced


def test_parts_of_a_step_sum_to_its_loss() -> None:
    student, teacher = torch.randn(4, 2, 60), torch.randn(4, 2, 60)
    sample = sample_queries(torch.tensor([60, 50, 9, 55]), 11, 5, 24, torch.Generator().manual_seed(1))
    whole = boundary_loss(student, teacher, Kept.of(teacher, SINKS, WINDOW, LONG), sample)
    parts = [
        boundary_loss(student[rows], teacher[rows], Kept.of(teacher[rows], SINKS, WINDOW, LONG), sample.take(rows))
        for rows in (torch.tensor([0, 2]), torch.tensor([1, 3]))
    ]
    assert torch.stack(parts).sum().item() == pytest.approx(whole.item(), rel=1e-5)
